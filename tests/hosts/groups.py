"""Control groups, version 1 or 2, that limit the cores and the memory of a host's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PERIOD_US = 10_000
"""A short period: with the usual 100 ms a host of half a core would stand still for 50 ms at a time."""


class Controller(NamedTuple):
    """What limits the processors or the memory of groups of processes.

    Attributes:
        name: of the controller.
        version: of control groups.
        folder: in which its groups are made: the top one, where whatever a killed run leaves behind is found again.
    """

    name: Literal["cpu", "memory"]
    version: Literal[1, 2]
    folder: Path

    def make(self, name: str, amount: float) -> Path:
        """The folder of the group `name`, new or not, with a limit of so many cores or bytes."""
        enabled = self.folder / "cgroup.subtree_control"
        if self.version == 2 and self.name not in _words(enabled):
            enabled.write_text(f"+{self.name}")
        group = self.folder / name
        group.mkdir(exist_ok=True)
        for file, value in self._limits(amount).items():
            (group / file).write_text(value)
        return group

    def _limits(self, amount: float) -> dict[str, str]:
        """What to write into which file: beside busy processes, too, a host gets the cores that it has."""
        quota_us = str(int(amount * _PERIOD_US))
        limits: dict[tuple[str, int], dict[str, str]] = {
            ("cpu", 1): {"cpu.shares": "262144", "cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota_us},
            ("cpu", 2): {"cpu.weight": "10000", "cpu.max": f"{quota_us} {_PERIOD_US}"},
            ("memory", 1): {"memory.limit_in_bytes": str(int(amount))},
            ("memory", 2): {"memory.max": str(int(amount))},
        }
        return limits[self.name, self.version]


def find(name: Literal["cpu", "memory"], root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Controller | None:
    """The controller of that name, or None if this machine has none that can be used.

    Args:
        name: of the controller.
        root: where control groups are mounted.
        membership: file whose lines `number:controllers:path` say which controllers are of version 1.
    """
    for line in membership.read_text().splitlines():
        controllers = line.split(":")[1]
        if name in controllers.split(",") and os.access(root / controllers, os.W_OK):
            return Controller(name, 1, root / controllers)
    usable = name in _words(root / "cgroup.controllers") and os.access(root / "cgroup.subtree_control", os.W_OK)
    return Controller(name, 2, root) if usable else None


def controllers() -> list[Controller]:
    """Those that can be used on this machine."""
    return [controller for controller in (find("cpu"), find("memory")) if controller]


def groups(prefix: str) -> list[Path]:
    """Folders of the groups whose name begins with `prefix`."""
    parents = {controller.folder for controller in controllers()}
    return sorted(path for parent in parents for path in parent.glob(f"{prefix}*"))


def processes_of(group: Path) -> list[int]:
    """Ids of the processes in a group."""
    return [int(word) for word in _words(group / "cgroup.procs")]


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
