"""Files and folders written whole or not at all: a reader, or a crash at any moment, finds the old or the new one."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")
"""What safetensors calls a file until it is written, beside the one that it is to become."""


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to `path`, whole or not at all; with `private`, readable for this user only."""
    with atomic_draft(path, private=private) as draft:
        draft.write_bytes(data)


@contextmanager
def atomic_draft(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Inside, a draft beside `path` is written, a file or a folder of files; it takes that name when the block ends.

    By then it is on the disk, and so is the name. If the block raises, nothing of it is left, and an OSError of it that
    names no file names `path`.

    Args:
        path: of the file, which it replaces, or of the folder, which must not be there.
        private: of a file; only this user may read it, from its first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    _remove(draft)
    try:
        if private:
            draft.touch(mode=0o600, exist_ok=False)
        yield draft
        for part in (*draft.rglob("*"), draft):
            _sync(part)
        draft.replace(path)
    except BaseException as error:
        _remove(draft)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or str(path)
        raise
    _sync(path.parent)


def remove_drafts(folder: Path, *, but_of_living: bool = False) -> None:
    """Remove the drafts in `folder` of processes that died while they wrote: for whoever alone writes there.

    Args:
        folder: to look into.
        but_of_living: leave alone what another process of this machine writes, if that lives. Under torchrun the rank
            that leads is not always the one that locked the folder.
    """
    for path in folder.glob(".*"):
        _, *numbers = path.name.rsplit(".", 2)
        is_ours = len(numbers) == 2 and all(map(str.isdecimal, numbers))
        if but_of_living and is_ours and _is_another_that_lives(int(numbers[0])):
            continue
        if is_ours or _OF_SAFETENSORS.fullmatch(path.name):
            _remove(path)


def _is_another_that_lives(pid: int) -> bool:
    """Return whether a process of this machine other than this one has the id `pid`."""
    import psutil  # loaded here: most commands write files and remove no drafts

    return pid != os.getpid() and psutil.pid_exists(pid)


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
