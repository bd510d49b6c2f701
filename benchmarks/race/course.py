"""The hosts and data of a contestant in the race, and functions that start commands on the hosts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BATCH = 147
"""Samples of a step over all nodes: a multiple of three for equal shares, and of 4 + 2 + 1 for those by speed."""
STEPS = 21
"""Steps of `BATCH` samples between two validations."""
LEARNING_RATE, MOMENTUM = 0.1, 0.9
PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host that trains.

    Attributes:
        name: of the host.
        address: of the host.
        cores: that its processes get together.
    """

    name: str
    address: str
    cores: float


class Started(Protocol):
    """A command on a host."""

    @property
    def text(self) -> str:
        """Its output so far."""

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """Return the first match of `pattern` in its output."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The hosts of one run.

    Attributes:
        nodes: that take part from the beginning, the fastest first.
        all_nodes: also those that join later.
        master: address of a host that does not train.
        network: of `workload.py`.
        data: folder of MNIST's four files.
        folder: for files of this run, the same on all hosts.
        start: (host, command) -> the command, started there.
        start_nodes: (node -> its command, nodes) -> the commands, started on these nodes; a node that comes later, or
            comes back, starts its command then.
        wait_for_nodes: returns when this command, `evener nodes --json`, shows all nodes.
    """

    nodes: Sequence[Node]
    all_nodes: Sequence[Node]
    master: str
    network: str
    data: Path
    folder: Path
    start: Callable[[str, Sequence[str]], Started]
    start_nodes: Callable[[Callable[[Node], Sequence[str]], Sequence[Node]], list[Started]]
    wait_for_nodes: Callable[[Sequence[str]], None]

    def script(self, name: str, *words: object) -> list[str]:
        """Return the command of a contestant's own script: the data and the folder of the run come first."""
        return [sys.executable, "-m", f"contestants.{name}", str(self.data), str(self.folder), *map(str, words)]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A tool, used as its documentation recommends.

    Attributes:
        title: in tables.
        package: distribution whose version is reported.
        page: documentation that the configuration follows.
        launch: starts it; returns the command whose output has a line with `accuracy 97.50%` for every validation.
        begins: pattern of what that command writes before the first step.
        steps: of `BATCH` samples between two validations.
    """

    title: str
    package: str
    page: str
    launch: Callable[[Course], Started]
    begins: str = "training begins"
    steps: int = STEPS
