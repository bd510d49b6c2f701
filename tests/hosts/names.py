"""Names that say whose they are, so that what a killed run left behind can be told from what is in use."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

PREFIX = "evener-hosts-"

_RUN = re.compile(rf"({PREFIX}(\d+)-(\d+)-\d+)\.")
_serial = itertools.count(1)


def new_run() -> str:
    """A name for one set of hosts: this process's id and the time of its start, which no other process shares."""
    return f"{PREFIX}{os.getpid()}-{started(os.getpid())}-{next(_serial)}"


def dead_runs(names: Iterable[str]) -> set[str]:
    """The runs, among those that `names` (`RUN.HOST`) belong to, whose process does not live any more."""
    runs = [match for match in map(_RUN.match, names) if match]
    return {run[1] for run in runs if started(int(run[2])) != int(run[3])}


def started(pid: int) -> int | None:
    """When the process was started, in ticks since the machine was; None if no such process lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
