"""Files that are still on their way to this machine: a process that opens one waits until it is there.

    FOLDER/a/b.png     as long as the file will be, and executable by its owner until all its bytes have come
    FOLDER.wanted      paths that processes wait for, a line each; removed when all files are complete

Programs may list folders and look at lengths at any time. An audit hook holds back `open`, and all that opens files by
it (NumPy, Pillow, gzip); code in C that opens files itself would read zeros, so data are read early only after a trial
(`data.early_data`). The files tell other processes what they need to know: those that load data, and ranks.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evener.records.errors import MissingFile

_VARIABLE = "EVENER_AWAITED_FOLDER"
"""Environment variable that names the folder to processes that load data."""
_OPENS = {"open", "sqlite3.connect"}
_COMING, _COMPLETE = 0o700, 0o600
_PAUSES = 0.001, 0.01
_CHECK_SECONDS = 0.2
_MAX_ROUNDS = 4

_has_hook = False
_awaited: dict[str, tuple[str, Callable[[], None]]] = {}
"""Awaited folders, each with a separator at its end: the file of wanted paths, and a function to call during waits."""


class _Thread(threading.local):
    """How this thread opens files.

    Attributes:
        opens_at_once: whether it does not wait.
        noted: files that it opens and that have not come, while `prefetch_files` notes them.
    """

    opens_at_once = False
    noted: list[str] | None = None


_thread = _Thread()


class _NotHereYet(BaseException):
    """Raised where a file that has not come is opened while files are noted."""


def wanted_file(folder: Path) -> Path:
    """Return the file with the paths that processes wait for."""
    return Path(f"{os.path.realpath(folder)}.wanted")


def announce_files(folder: Path, files: Iterable[tuple[str, int]]) -> bool:
    """Make files that are not there yet, and return true; make none if this system marks no file as executable.

    Args:
        folder: folder of the files, which exists.
        files: their paths, relative to the folder, and sizes; empty ones are complete.

    Raises:
        OSError: they cannot be created.
    """
    marked = str(wanted_file(folder))
    os.close(os.open(marked, os.O_CREAT | os.O_WRONLY, _COMPLETE))
    are_alike = _is_coming(marked)
    os.chmod(marked, _COMING)
    if are_alike or not _is_coming(marked):
        complete_folder(folder)
        return False
    parents = set[str]()
    for path, size in files:
        place = os.path.join(folder, path)
        if (parent := os.path.dirname(place)) not in parents:
            os.makedirs(parent, exist_ok=True)
            parents.add(parent)
        file = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _COMING if size else _COMPLETE)
        try:
            os.truncate(file, size)
        finally:
            os.close(file)
    return True


def complete_file(folder: Path, path: str) -> None:
    """Mark a file as complete. Raises OSError."""
    os.chmod(os.path.join(folder, path), _COMPLETE)


def complete_folder(folder: Path) -> None:
    """Note that all files of a folder are complete."""
    wanted_file(folder).unlink(missing_ok=True)


@contextmanager
def opened_at_once() -> Iterator[None]:
    """Let this thread open files that have not come, as the one that writes them has to."""
    _thread.opens_at_once = True
    try:
        yield
    finally:
        _thread.opens_at_once = False


def await_files(folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Have this process, and those that load data for it, wait for files of `folder` when they open them.

    Args:
        folder: folder of the files; nothing is awaited if all of them are complete.
        check: called several times a second during a wait; may raise.
    """
    global _has_hook
    if not wanted_file(folder).exists():
        return
    if not _has_hook:
        sys.addaudithook(_on_event)  # for good: it cannot be removed
        _has_hook = True
    for path in {os.path.abspath(folder), os.path.realpath(folder)}:
        _awaited[path + os.sep] = str(wanted_file(folder)), check
    os.environ[_VARIABLE] = str(folder)


def await_files_in_process() -> None:
    """Have a process that was started without a fork wait as the one that started it."""
    if (folder := os.environ.get(_VARIABLE)) and not _awaited:
        await_files(Path(folder))


def await_no_files(folder: Path) -> None:
    """Wait for files of `folder` no more."""
    for path in {os.path.abspath(folder), os.path.realpath(folder)}:
        _awaited.pop(path + os.sep, None)
    if os.environ.get(_VARIABLE) == str(folder):
        del os.environ[_VARIABLE]


def prefetch_files(read: Callable[[int], object], samples: Iterable[int]) -> None:
    """Have the files of samples fetched together that are about to be read, instead of one after the other.

    Args:
        read: reads a sample; it is broken off where it opens a file that has not come.
        samples: numbers of the samples.
    """
    if not any(os.path.exists(wanted) for wanted, _ in _awaited.values()):
        return
    for _ in range(_MAX_ROUNDS):  # a sample may need several files, one after the other
        requested: list[str] = []
        with _noting_files(requested):
            samples = [sample for sample in samples if _is_broken_off(read, sample)]
        if not requested:
            return
        for path in requested:
            _on_event("open", (path,))


@contextmanager
def _noting_files(requested: list[str]) -> Iterator[None]:
    _thread.noted = requested
    try:
        yield
    finally:
        _thread.noted = None


def _is_broken_off(read: Callable[[int], object], sample: int) -> bool:
    try:
        read(sample)
    except _NotHereYet:
        return True
    except Exception:
        return False  # reading it in earnest reports the error
    return False


def _is_coming(path: str) -> bool:
    try:
        return bool(os.stat(path).st_mode & stat.S_IXUSR)
    except OSError:  # no such file; opening it reports that
        return False


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _awaited or event not in _OPENS or _thread.opens_at_once:
        return
    if isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        for folder, (wanted, check) in list(_awaited.items()):
            if path.startswith(folder) and _is_coming(path):
                _await(path, path[len(folder) :].replace(os.sep, "/"), wanted, check)


def _await(path: str, name: str, wanted: str, check: Callable[[], None]) -> None:
    """Request a file, and return when it is complete; raise _NotHereYet instead of waiting while files are only noted.

    Args:
        path: path of the file.
        name: path in its folder.
        wanted: file with wanted paths.
        check: called several times a second; may raise.

    Raises:
        MissingFile: the transfer has ended without the file.
    """
    with suppress(FileNotFoundError):  # all have come at this moment
        file = os.open(wanted, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, name.encode(errors="surrogateescape") + b"\n")
        finally:
            os.close(file)
    if _thread.noted is not None:
        _thread.noted.append(path)
        raise _NotHereYet
    pause, checked = _PAUSES[0], time.monotonic()
    while _is_coming(path):
        if not os.path.exists(wanted) and _is_coming(path):  # it is removed after the last file is complete
            raise MissingFile(f"{name} of the data has not come, for the transfer has ended")
        time.sleep(pause)
        pause = min(1.5 * pause, _PAUSES[1])
        if time.monotonic() - checked > _CHECK_SECONDS:
            checked = time.monotonic()
            check()
    if not os.path.exists(path):
        raise MissingFile(f"{name} of the data has not come, for the transfer has ended")


class Wanted:
    """The paths that processes wait for.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._read = wanted_file(folder), 0

    def new(self) -> Iterator[str]:
        """Yield the paths since the last call."""
        try:
            if self._file.stat().st_size == self._read:
                return
            with self._file.open("rb") as file:
                file.seek(self._read)
                lines = file.read()
        except OSError:  # there is none yet
            return
        end = lines.rfind(b"\n") + 1
        self._read += end
        for line in lines[: max(0, end - 1)].split(b"\n"):
            yield line.decode(errors="surrogateescape")
