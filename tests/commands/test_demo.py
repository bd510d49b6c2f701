"""The demo compares ways that take turns: what it says of their rounds, and that it leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
import pytest

from evener.commands import demo
from evener.commands.demo import WAYS, verdict
from evener.config.options import DemoConfig
from evener.records.errors import InvalidInput, TrainingFailed
from evener.report.bars import comparison_figure
from support.command_cluster import wait_until
from support.fake_runs import fake_run

ALONE = [1000.0, 1020.0, 980.0, 1000.0]


def speeds(of_ideal: list[float], total: float = 1.75) -> dict[str, list[float]]:
    around = [(before + after) / 2 for before, after in pairwise(ALONE)]
    evener = [total * alone * one for alone, one in zip(around, of_ideal, strict=True)]
    return dict(zip(WAYS, (ALONE, [one / 2 for one in evener], evener), strict=True))


def test_verdict_has_medians_and_ranges() -> None:
    of_ideal = [0.94, 0.96, 0.95]
    sentence = verdict(speeds(of_ideal), of_ideal, 0.05)
    for figures in ("1.66 (1.64 to 1.68) times", "2.00 (2.00 to 2.00) times", "95 % (94 % to 96 %)", "3 rounds"):
        assert figures in sentence
    assert "Other programs" not in sentence
    assert verdict(speeds(of_ideal), of_ideal, 0.9).endswith("Other programs used 0.9 cores of this machine meanwhile.")


def test_verdict_of_rounds_that_differ_is_no_figure() -> None:
    of_ideal = [0.60, 0.95, 0.80]
    sentence = verdict(speeds(of_ideal), of_ideal, 1.2)
    assert "too busy" in sentence
    assert "times as fast" not in sentence
    assert "1.2 cores" in sentence


def test_verdict_without_a_round_says_why() -> None:
    assert "--epochs" in verdict({name: [] for name in WAYS}, [], 0.0)


def test_steps_in_which_a_run_was_stopped_do_not_count() -> None:
    record = fake_run(num_steps=9)
    typical = record.steps[0].seconds
    stopped = msgspec.structs.replace(record.steps[4], seconds=typical + 5.0)
    record = msgspec.structs.replace(record, steps=(*record.steps[:4], stopped, *record.steps[5:]), seconds=60.0)
    of_ideal = [0.94, 0.96, 0.95]
    result = demo._Result(speeds=speeds(of_ideal), of_ideal=of_ideal)
    found = demo._between_turns(record, result, "evener")
    assert [step.step for step in found.steps] == [step.step for step in record.steps if step is not stopped]
    assert found.seconds == pytest.approx(8 * typical + sum(one.seconds for one in record.validations), rel=0.5)
    assert found.samples_per_second == pytest.approx(median(result.speeds["evener"]))
    assert found.of_ideal == pytest.approx(0.95)
    assert demo._between_turns(record, result, "equal shares").of_ideal is None


def test_picture_shows_the_ranges() -> None:
    records = {name: msgspec.structs.replace(fake_run(num_steps=2), samples_per_second=100.0) for name in WAYS}
    (axes,) = comparison_figure(records, {"evener": (90.0, 120.0)}).axes
    lines: list[Any] = list(axes.collections)
    (line,) = [segment for found in lines for segment in found.get_segments()]
    assert [x for x, _ in line] == [90.0, 120.0]


def children() -> list[int]:
    return [one.pid for one in psutil.Process().children(recursive=True)]


def test_error_of_a_run_is_that_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    with pytest.raises(InvalidInput) as error:
        demo.demo(DemoConfig(task=str(tmp_path / "missing.py"), output=tmp_path / "demo"), as_json=True)
    assert "missing.py" in str(error.value)
    assert children() == before


def test_run_that_makes_no_step_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 60 &\nsleep 60\n")
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(demo, "_START_SECONDS", 0.5)
    before = children()
    with pytest.raises(TrainingFailed):
        demo.demo(DemoConfig(output=tmp_path / "demo"), as_json=True)
    assert children() == before


def stopped_and_others(pid: int) -> list[psutil.Process]:
    """All descendants of a process if one of them is stopped."""
    runs = psutil.Process(pid).children(recursive=True)
    return runs if any(one.status() == psutil.STATUS_STOPPED for one in runs) else []


@pytest.mark.slow
def test_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evener", "demo", "--output", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "equal shares" not in process.stdout.readline():  # the first run is stopped
            assert process.poll() is None
        runs = wait_until(lambda: stopped_and_others(process.pid), "that a run is stopped")
        process.kill()
    assert psutil.wait_procs(runs, timeout=20)[1] == []


@pytest.mark.slow
@pytest.mark.alone
def test_three_ways_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    records = demo.demo(DemoConfig(output=tmp_path / "demo"), as_json=True)
    assert children() == before
    rows: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(rows) == ["best_node_alone", "equal_shares", "evener"]
    rounds = [row["rounds"] for row in rows.values()]
    assert 3 <= len(rounds[0]) - 1 == len(rounds[1]) == len(rounds[2])
    assert 0.5 < (records["evener"].of_ideal or 0) <= 1
    assert records["evener"].samples_per_second > records["equal shares"].samples_per_second
    for record in records.values():
        assert not record.ending
        assert (record.validation_accuracy or 0) > 0.9
        assert max(step.seconds for step in record.steps) < demo._TURN_SECONDS
    assert {"demo.html", "demo.png"} <= {path.name for path in (tmp_path / "demo").iterdir()}
