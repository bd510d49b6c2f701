"""A disk that is full, as this process sees it, or as all do."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, no file of this process may become larger than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class SmallDisk:
    """A disk of 4 MiB at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filling = folder, folder / "filling"

    def fill(self, room: int = 0) -> None:
        """Leave `room` bytes on it, or a page less."""
        found = os.statvfs(self.folder)
        with self._filling.open("ab") as file:
            file.write(bytes(max(0, found.f_bavail * found.f_frsize - room)))


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """A disk, gone when the block is left; skips the test where none can be made."""
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
