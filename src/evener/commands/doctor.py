"""`evener doctor`: a table of findings, and an exit code. Needs no PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from evener.commands.doctor_nodes import look_at_nodes, question_of
from evener.commands.node_look import folders
from evener.commands.task_look import look_at_task
from evener.commands.up import open_master
from evener.config.options import DoctorConfig
from evener.doctor.examine import examine
from evener.doctor.finding import Finding, faults, has_error
from evener.doctor.machine_checks import check_machine
from evener.records.errors import InvalidInput
from evener.report.text import grid
from evener.training.console import open_console

_MAX_ROWS = 100
_MARKS = {"ok": "ok", "warning": "!", "error": "X"}


def doctor(config: DoctorConfig, *, as_json: bool) -> int:
    """Examine this machine, or a master's nodes, and print findings; return 2 if a run would fail, else 0.

    Raises:
        EvenerError: the master cannot be reached or does not answer.
    """
    findings = _findings_of_nodes(config) if config.looks_at_nodes else _findings_here(config)
    if as_json:
        sys.stdout.write(msgspec.json.encode({"findings": findings}).decode() + "\n")
    else:
        print_findings(findings, open_console(to_stderr=False, width_in_files=80))
    return InvalidInput.exit_code if has_error(findings) else 0


def _findings_here(config: DoctorConfig) -> list[Finding]:
    look = None if config.task is None else look_at_task(config.task, config.data, config.option)
    return check_machine(examine(folders(config.output), task_problem=None if look is None else look.problem))


def _findings_of_nodes(config: DoctorConfig) -> list[Finding]:
    question = () if config.task is None else question_of(config.task, config.data, config.option)
    with open_master(config) as client:
        return look_at_nodes(client, *question)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of findings, and one line that counts faults; of many findings, print only faults."""
    wrong = faults(findings)
    shown = findings if len(findings) <= _MAX_ROWS else wrong
    if shown:
        console.print(findings_table(shown))
    if len(shown) < len(findings):
        console.print(f"{len(findings) - len(shown)} more were looked at and are well; --json shows them")
    num_errors = sum(finding.severity == "error" for finding in wrong)
    num_warnings = len(wrong) - num_errors
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((num_errors, "error"), (num_warnings, "warning")) if n]
    console.print(" and ".join(counts) if counts else "nothing is wrong here")


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table with one row per finding: machine, subject, severity, and the sentence with its cure."""
    rows = []
    for finding in findings:
        cure = f"; {finding.cure}" if finding.cure else ""
        rows.append((finding.machine, finding.what, _MARKS[finding.severity], f"{finding.sentence}{cure}"))
    return grid("What was looked at", ("machine", "what", "", "finding"), rows, caption="X error, ! warning")
