"""Locks of folders."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evener.records.errors import FolderInUse
from evener.system.file_lock import FolderLock, lock_file, shared_folder
from support import foreign_system

SYSTEM_CALL = "fcntl.flock" if hasattr(os, "fork") else "msvcrt.locking"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_folder_without_locks_is_used_and_never_cleaned(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SYSTEM_CALL, refuse)
    with shared_folder(tmp_path / "cache", lambda: pytest.fail("others may use it")):
        assert (tmp_path / "cache").is_dir()


def test_error_of_cleaning_is_raised(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)), shared_folder(tmp_path, fail):
        pass


def test_other_errors_of_locks_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SYSTEM_CALL, fail)
    with pytest.raises(OSError, match="error"), shared_folder(tmp_path, lambda: None):
        pass


BEGIN = """
import sys
from pathlib import Path
if sys.argv[1] == "windows":
    from support.foreign_system import leave_posix
    leave_posix()
from evener.system.file_lock import FolderLock, lock_file, shared_folder
from evener.records.errors import FolderInUse
folder = Path(sys.argv[2])
"""
LOOK = """
try:
    with FolderLock(folder):
        print("folder: mine")
except FolderInUse as error:
    print("folder:", error.holder)
print("file:", "theirs" if lock_file(folder / "file") is None else "mine")
with shared_folder(folder / "shared", lambda: print("cleaned")):
    print("shared")
"""
HOLD = """
held = lock_file(folder / "file")
with FolderLock(folder), shared_folder(folder / "shared", lambda: None):
    print(flush=True)
    sys.stdin.read()
"""


def process(system: str, folder: Path, code: str) -> subprocess.Popen[str]:
    """Start a process on this system that runs `code`."""
    paths = os.pathsep.join([str(Path(foreign_system.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    typed, pipe = [sys.executable, "-c", BEGIN + code, system, str(folder)], subprocess.PIPE
    return subprocess.Popen(typed, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": paths})


def seen_by_another(system: str, folder: Path) -> list[str]:
    """Return the lines in which another process on this system says what it finds."""
    with process(system, folder, LOOK) as other:
        said, _ = other.communicate(timeout=30)
    assert other.returncode == 0
    return said.splitlines()


@pytest.mark.posix
@pytest.mark.parametrize("system", ["posix", "windows"])
def test_locks_hold_between_processes_and_end_with_their_owner(system: str, tmp_path: Path) -> None:
    with process(system, tmp_path, HOLD) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        owner = f"process {other.pid} on {socket.gethostname()}"
        assert seen_by_another(system, tmp_path) == [f"folder: {owner}", "file: theirs", "shared"]
        other.kill()
    assert seen_by_another(system, tmp_path) == ["folder: mine", "file: mine", "cleaned", "shared"]


def test_locks_hold_within_a_process(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(FolderInUse):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()
    first = lock_file(tmp_path / "file")
    assert first is not None
    assert lock_file(tmp_path / "file") is None
    first.close()
    again = lock_file(tmp_path / "file")
    assert again is not None
    again.close()
