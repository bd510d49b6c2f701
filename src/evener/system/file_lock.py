"""Locks on files, which the system releases when the process that holds one ends, in any way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self
from weakref import WeakSet

from evener.records.errors import FolderInUse, InvalidInput

_LOCK = ".lock"


def lock_file(path: Path) -> IO[str] | None:
    """Open and lock `path`; closing the file releases it. None: another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
    """
    opened = path.open("a+")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            opened.close()
            raise
    _held.add(opened)
    return opened


_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of a file system without locks, where a run continues without one."""
_held: WeakSet[IO[str]] = WeakSet()


def _release_in_child() -> None:
    """Release locks in a forked process, such as a data loader, which must not hold them longer than their owner."""
    for opened in list(_held):
        opened.close()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def shared_folder(folder: Path, clean: Callable[[], None]) -> Iterator[None]:
    """Use `folder` together with other processes inside; the first of them calls `clean` before.

    So files of killed processes are removed when no remaining process can be using them. A file system without locks
    does not tell that, so nothing is removed there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+") as lock:
        if _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            clean()
        _locked(lock, fcntl.LOCK_SH)
        yield


def _locked(opened: IO[str], kind: int) -> bool:
    """Lock an open file; return False if another process holds the lock, or the file system has none."""
    try:
        fcntl.flock(opened, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    return True


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
            os.truncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()

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
