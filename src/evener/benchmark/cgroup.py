"""The memory that a container or a scheduler leaves to this process, from Linux's control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60


class MemoryLimit(NamedTuple):
    """What one control group allows.

    Attributes:
        total_bytes: the limit.
        free_bytes: what is left of it; a file's pages that can be dropped count as free.
    """

    total_bytes: int
    free_bytes: int


class _Files(NamedTuple):
    limit: str
    usage: str
    droppable: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def memory_limits(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> list[MemoryLimit]:
    """The limits of every memory control group that this process is in; empty where there are none.

    Args:
        root: where control groups are mounted.
        membership: file that says which ones the process is in, lines of `number:controllers:path`.
    """
    limits = []
    for folder, files in _folders(root, _read(membership)):
        total, usage = _number(_read(folder / files.limit)), _number(_read(folder / files.usage))
        if total is not None and total < _UNLIMITED:
            droppable = _statistic(_read(folder / "memory.stat"), files.droppable)
            limits.append(MemoryLimit(total, min(total, max(0, total - (usage or 0) + droppable))))
    return limits


def _folders(root: Path, membership: str) -> Iterator[tuple[Path, _Files]]:
    """The process's own groups and all above them; a container may see only the top one."""
    for line in membership.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mounts, files = [root, root / "unified"], _VERSION_2
        elif "memory" in controllers.split(","):
            mounts, files = [root / controllers, root / "memory"], _VERSION_1
        else:
            continue
        for mount in dict.fromkeys(mounts):
            own = mount / path.strip().lstrip("/")
            for folder in (own, *own.parents):
                yield folder, files
                if folder == mount:
                    break


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _statistic(text: str, name: str) -> int:
    """The value of `name` in lines of `name value`; 0 if it is not there."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)
