"""Locks on files, which the system releases when the process that holds one ends, in any way."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self
from weakref import WeakSet

from evener.records.errors import FolderInUse, InvalidInput

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]
    msvcrt: Any = import_module("msvcrt")

_LOCK = ".lock"


def lock_file(path: Path) -> IO[str] | None:
    """Open and lock `path`; closing the file releases it. None: another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
    """
    opened = path.open("a+", encoding="utf-8")
    try:
        is_locked = _lock(opened)
    except OSError:
        opened.close()
        raise
    if is_locked is False:
        opened.close()
        return None
    _held.add(opened)
    return opened


def is_locked(path: Path) -> bool | None:
    """Return whether another process has locked `path`; None if its file system has no locks. Raises OSError."""
    with path.open("a+", encoding="utf-8") as opened:
        is_free = _lock(opened)
    return None if is_free is None else not is_free


_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of a file system without locks, where a run continues without one."""
_held: WeakSet[IO[str]] = WeakSet()


def _release_in_child() -> None:
    """Release locks in a forked process, such as a data loader, which must not hold them longer than their owner."""
    for opened in list(_held):
        opened.close()


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def shared_folder(folder: Path, clean: Callable[[], None]) -> Iterator[None]:
    """Use `folder` together with other processes inside; the first of them calls `clean` before.

    So files of killed processes are removed when no remaining process can be using them. A file system without locks
    does not tell that, so nothing is removed there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+") as lock:
        if _lock(lock):
            clean()
        _share(lock)
        yield


def _lock(opened: IO[str]) -> bool | None:
    """Lock an open file; return False if another process holds it or shares it, None without locks. Raises OSError."""
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return _lock_bytes(opened, 0, _SHARERS)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return None


def _share(opened: IO[str]) -> None:
    """Wait until no other process has locked an open file, and let others share it from then on. Raises OSError."""
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_SH)
            return
        _unlock_bytes(opened, 0, _SHARERS)
        while not any(_lock_bytes(opened, place, 1) for place in range(_SHARERS)):
            time.sleep(_PAUSE_SECONDS)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


_SHARERS = 64
"""Bytes of a file's lock on Windows, which knows no shared locks: a process that shares the file locks one of them."""
_LOCKED_FROM = 1 << 30
"""Position of these bytes, far behind the text: a locked byte cannot be read by others."""
_PAUSE_SECONDS = 0.05


def _lock_bytes(opened: IO[str], first: int, count: int) -> bool:
    """Lock `count` bytes of the lock on Windows; return False if another process has locked one of them."""
    os.lseek(opened.fileno(), _LOCKED_FROM + first, os.SEEK_SET)
    try:
        msvcrt.locking(opened.fileno(), msvcrt.LK_NBLCK, count)
    except PermissionError:
        return False
    return True


def _unlock_bytes(opened: IO[str], first: int, count: int) -> None:
    os.lseek(opened.fileno(), _LOCKED_FROM + first, os.SEEK_SET)
    with contextlib.suppress(PermissionError):  # they were not locked
        msvcrt.locking(opened.fileno(), msvcrt.LK_UNLCK, count)


class FolderLock:
    """Lock of the one process that may write into a folder, from construction until `release`.

    Args:
        folder: folder to lock.

    Raises:
        FolderInUse: another process holds the lock.
        InvalidInput: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        self._file = self._locked(folder)
        with contextlib.suppress(OSError):  # the lock holds on a full disk, too
            os.ftruncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            if fcntl is not None:
                self._path.unlink(missing_ok=True)
                self._file.close()
                return
            self._file.close()  # Windows removes no file that is open
            with contextlib.suppress(PermissionError):  # another process has opened it since
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _locked(self, folder: Path) -> IO[str]:
        while True:
            try:
                opened = lock_file(self._path)
            except OSError as error:
                raise InvalidInput(f"cannot write into {folder}: {error.strerror}") from error
            if opened is None:
                raise FolderInUse(folder, self._path.read_text() if self._path.exists() else "")
            if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(opened.fileno())):
                return opened
            opened.close()  # the previous owner removed the file between our opening and our locking it
