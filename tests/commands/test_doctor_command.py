"""`evener doctor`, as typed: a table within 80 columns, JSON, and an exit code that says whether runs would fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.commands.doctor import print_findings
from evener.commands.task_look import look_at_task
from evener.doctor.machine_checks import check_machine
from evener.training.console import open_console
from support.commands import evener
from support.machine_facts import SOUND


def test_doctor_exits_with_0_or_2(tmp_path: Path) -> None:
    result = evener("doctor", "--json", cwd=tmp_path)
    findings = json.loads(result.stdout)["findings"]
    is_wrong = any(one["severity"] == "error" for one in findings)
    assert result.returncode == (2 if is_wrong else 0), result.stderr
    assert {"versions", "memory", "disk", "clock"} <= {one["what"] for one in findings}


def test_missing_module_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("import no_such_module\n")
    result = evener("doctor", "--task", "my_task.py", "--json", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    [problem] = [one for one in json.loads(result.stdout)["findings"] if one["what"] == "task"]
    assert problem["severity"] == "error"
    assert "my_task.py line 1: ModuleNotFoundError: No module named 'no_such_module'" in problem["sentence"]


def test_missing_data_are_a_problem_of_the_task(tmp_path: Path) -> None:
    assert "mnist" in look_at_task("mnist", tmp_path).problem.lower()
    assert look_at_task("digits").problem == ""


def test_doctor_table_fits_80_columns_and_counts_the_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    import msgspec

    broken = msgspec.structs.replace(SOUND, free_bytes=10**6, task_problem="no module named einops", clock=0.0)
    print_findings(check_machine(broken), open_console(to_stderr=False))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "3 errors" in shown
    print_findings(check_machine(SOUND), open_console(to_stderr=False))
    assert "nothing is wrong here" in capsys.readouterr().out
    print_findings([*check_machine(SOUND) * 20, *check_machine(broken)], open_console(to_stderr=False))
    shown = capsys.readouterr().out
    assert "more were looked at and are well; --json shows them" in " ".join(shown.split())
    assert len(shown.splitlines()) < 20
