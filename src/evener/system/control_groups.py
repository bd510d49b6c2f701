"""The Linux control groups, versions 1 and 2, of this process, which hold the limits of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
"""Lines of `number:controllers:path`, one for every hierarchy of control groups."""
_MOUNTS = Path("/proc/self/mountinfo")
"""Lines whose fourth and fifth fields are the root of a mount and its folder."""


class ControlGroup(NamedTuple):
    """A control group of a process.

    Attributes:
        folder: folder of its files.
        version: version of control groups, which determines the names of the files.
    """

    folder: Path
    version: Literal[1, 2]

    def read(self, file: str) -> str:
        """Return the contents of a file; empty if it does not exist."""
        return _read(self.folder / file)


def groups_of(controller: str) -> Iterator[ControlGroup]:
    """Yield the process's own groups of `cpu` or `memory`, and their parents; a container may see only the top one."""
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        version: Literal[1, 2]
        if controllers == "":
            mounts, version = [_ROOT, _ROOT / "unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [_ROOT / controllers, _ROOT / controller], 1
        else:
            continue
        for mount in dict.fromkeys(mounts):
            group = _namespace_folder(mount) / path.strip().lstrip("/")
            for folder in (group, *group.parents):
                yield ControlGroup(folder, version)
                if folder == mount:
                    break


def _namespace_folder(mount: Path) -> Path:
    """Return the folder that paths of groups are relative to.

    It is `mount`, unless this process is in a namespace of control groups and still sees a mount from outside: the root
    of that mount is then `/..`, or `/../..`, and the folder lies so many levels below it.
    """
    fields = (line.split() for line in _read(_MOUNTS).splitlines())
    root = next((line[3] for line in fields if len(line) > 4 and line[4] == str(mount)), "/")
    levels = root.split("/").count("..")
    if not levels:
        return mount
    process = str(os.getpid())
    folders = (folder for folder in mount.glob("*/" * levels) if folder.is_dir())
    return next((folder for folder in folders if _holds(folder, process)), mount)


def _holds(folder: Path, process: str) -> bool:
    """Return whether a process is in the group of a folder or in one below it."""
    return any(process in _read(file).split() for file in folder.rglob("cgroup.procs"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
