"""`evener doctor`: from what was asked for to a table of findings and an exit code. Needs no PyTorch."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from evener.doctor.examine import examine
from evener.doctor.finding import Finding, faults, has_error
from evener.doctor.machine_checks import SHARED, check_machine
from evener.errors import EvenerError, InvalidInput
from evener.host import version_of
from evener.ps.config import default_cache
from evener.report.text import grid
from evener.run.console import open_console
from evener.run.options import DoctorConfig
from evener.schema import shown
from evener.tasks.load import blaming, has_thin_task, is_path, load_any_task, load_thin_task

_SHARED_MEMORY = Path("/dev/shm")
_MARKS = {"ok": "ok", "warning": "!", "error": "X"}


def doctor(config: DoctorConfig, *, as_json: bool) -> int:
    """Look at this machine and print what is found; the exit code, 2 where some run would fail."""
    facts = examine(folders(config.output), task_problem=None if config.task is None else task_problem(config))
    findings = check_machine(facts)
    if as_json:
        sys.stdout.write(msgspec.json.encode({"findings": findings}).decode() + "\n")
    else:
        print_findings(findings, open_console(to_stderr=False, width_in_files=80))
    return InvalidInput.exit_code if has_error(findings) else 0


def folders(output: Path) -> dict[str, Path]:
    """Where runs write, by what lies there."""
    shared = {SHARED: _SHARED_MEMORY} if _SHARED_MEMORY.is_dir() else {}
    return {
        "runs": output,
        "cache": default_cache(os.environ),
        "temporary files": Path(tempfile.gettempdir()),
        **shared,
    }


def task_problem(config: DoctorConfig) -> str:
    """Why a task cannot be loaded here, or its data cannot; empty if they can."""
    assert config.task is not None
    is_thin = not version_of("torch") and has_thin_task(config.task)
    load = load_thin_task if is_thin else load_any_task
    try:
        with blaming(Path(config.task).resolve()) if is_path(config.task) else nullcontext():
            load(config.task, config.data, config.option).train_data()
    except EvenerError as error:
        return shown(str(error))
    return ""


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """A table, faults marked, and one line that counts them."""
    console.print(findings_table(findings))
    wrong = faults(findings)
    num_errors = sum(finding.severity == "error" for finding in wrong)
    num_warnings = len(wrong) - num_errors
    words = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((num_errors, "error"), (num_warnings, "warning")) if n]
    console.print(" and ".join(words) if words else "nothing is wrong here")


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row a finding: the machine, what was looked at, how it is, and the sentence with its cure."""
    rows = []
    for finding in findings:
        cure = f"; {finding.cure}" if finding.cure else ""
        rows.append((finding.machine, finding.what, _MARKS[finding.severity], f"{finding.sentence}{cure}"))
    return grid("What was looked at", ("machine", "what", "", "finding"), rows, caption="X error, ! warning")
