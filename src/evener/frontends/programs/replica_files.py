"""The files of a forked replica: it reads them as its rank does, and changes nothing that the rank sees.

    open before the fork     read only        opened again, so that its position moves in the replica alone
                             read and write   a private copy up to 64 MB, 256 MB in all; else without writing, as on a
                                              full disk
                             write only       writes are discarded
                             pipes, sockets   closed, because what the replica reads would be lost for the rank
    opened afterwards        to be read       as usual
                             to be written    discarded; for reading and writing, a private copy up to 64 MB
    renamed, removed ...                      nothing happens

Temporary files are made in the replica's own folder, which the rank removes.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from evener.records.errors import InvalidInput
from evener.system.process_exit import put_worker_sockets_into

with suppress(ImportError):  # on Windows, where no replica is forked
    import fcntl

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_IN_MEMORY = ("/dev/shm/", "/memfd:")
_MAX_COPY_BYTES, _MAX_COPIED_BYTES = 64 * 2**20, 256 * 2**20
"""Largest copy of one file, and of all files that are open when the replica is forked."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = ("remove", "unlink", "rename", "replace", "mkdir", "rmdir", "truncate", "link", "symlink", "utime", "chmod")
"""Functions of `os` that change files."""
_CHANGE_EVENTS = frozenset(f"os.{name}" for name in _CHANGES)
_REFUSAL = "a copy of the program writes no files"


def separate_open_files(needed: Container[int]) -> None:
    """Let this process share no open file with the one that forked it, except the `needed` descriptors."""
    copied = 0
    for name in os.listdir(_DESCRIPTORS):
        if int(name) not in needed and _is_open(int(name)):
            copied += _separate(int(name), _MAX_COPIED_BYTES - copied)


def discard_writes(folder: Path) -> None:
    """Let this process write no files outside of `folder`, without an error.

    Raises:
        InvalidInput: later, in the program, when it writes in a way that cannot be discarded.
    """
    tempfile.tempdir, sys.dont_write_bytecode = str(folder), True
    put_worker_sockets_into(str(folder))
    opened, descriptor_of, saved = io.open, os.open, torch.save

    def open_discarding(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if _is_inside(file, folder) or not set(mode) & set("wax+"):
            return opened(file, mode, *arguments, **named)
        if "+" not in mode:
            return opened(os.devnull, mode.replace("x", "w"), *arguments, **named)
        return opened(_private_copy(os.fsdecode(file), folder), mode.replace("x", "w"), *arguments, **named)

    def descriptor_discarding(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if _is_inside(path, folder) or not flags & _WRITING or flags & os.O_RDWR:
            return descriptor_of(path, flags, *arguments, **named)
        return descriptor_of(os.devnull, os.O_WRONLY)

    def save_discarding(value: Any, file: Any, *arguments: Any, **named: Any) -> None:
        if _is_inside(file, folder):
            saved(value, file, *arguments, **named)

    builtins.open = io.open = open_discarding
    os.open = descriptor_discarding
    for name in _CHANGES:
        if hasattr(os, name):
            setattr(os, name, _without_effect(getattr(os, name), folder))
    vars(torch)["save"] = save_discarding  # it opens files without Python

    def refuse_changes(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in _CHANGE_EVENTS or (event == "open" and bool((arguments[2] or 0) & _WRITING))
        if is_change and not _is_inside(arguments[0], folder):
            raise InvalidInput(_REFUSAL)

    sys.addaudithook(refuse_changes)


def _is_open(descriptor: int) -> bool:
    """Whether a descriptor is still open; that of the listing is not."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _separate(descriptor: int, room: int) -> int:
    """Replace an open file by one that this process alone uses; return the copied bytes, at most `room`."""
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode):
        path, access = f"{_DESCRIPTORS}/{descriptor}", fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if access == os.O_WRONLY:
            _replace(descriptor, os.open(os.devnull, os.O_WRONLY))
        elif access == os.O_RDONLY or not os.readlink(path).startswith(_IN_MEMORY):
            position, is_copied = os.lseek(descriptor, 0, os.SEEK_CUR), False
            if access == os.O_RDWR and facts.st_size <= min(_MAX_COPY_BYTES, room):
                with suppress(OSError):  # the disk is full
                    _replace(descriptor, _opened_copy(path), position)
                    is_copied = True
            if not is_copied:
                _replace(descriptor, _opened_to_read(path), position)
            return facts.st_size if is_copied else 0
    elif stat.S_ISFIFO(facts.st_mode) or stat.S_ISSOCK(facts.st_mode) or os.isatty(descriptor):
        _replace(descriptor, os.open(os.devnull, os.O_WRONLY))
    return 0


def _opened_to_read(path: str) -> int:
    """Return a new descriptor of an open file, or of nothing if this process may not open it any more."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)


def _replace(descriptor: int, other: int, position: int = 0) -> None:
    if position:
        os.lseek(other, position, os.SEEK_SET)
    os.dup2(other, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(other)


def _opened_copy(path: str) -> int:
    """Return the descriptor of a copy of an open file. Raises OSError."""
    with open(path, "rb") as source, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        return os.dup(copy.fileno())


def _private_copy(path: str, folder: Path) -> str:
    """Copy a file into `folder`, once. Raises InvalidInput if it is large."""
    copy = folder / f"copy-{abs(hash(os.path.abspath(path)))}"
    if not copy.exists() and os.path.exists(path):
        if os.path.getsize(path) > _MAX_COPY_BYTES:
            raise InvalidInput(_REFUSAL)
        shutil.copyfile(path, copy)
    return str(copy)


def _is_inside(file: Any, folder: Path) -> bool:
    """Whether `file` is no path, or the path of something that a replica may write."""
    if not isinstance(file, str | bytes | os.PathLike):
        return True
    path = os.fsdecode(file)
    return path.startswith((str(folder), "/dev/", "/proc/")) and not path.startswith(_IN_MEMORY)


def _without_effect(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def discard(*arguments: Any, **named: Any) -> Any:
        paths = [one for one in (*arguments, *named.values()) if isinstance(one, str | bytes | os.PathLike)]
        return function(*arguments, **named) if all(_is_inside(path, folder) for path in paths) else None

    return discard
