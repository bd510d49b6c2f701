"""Atomic writes of files and folders: a reader, or a crash at any moment, finds the old or the new one."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SYNCS_FOLDERS = hasattr(os, "O_DIRECTORY")
"""Whether the system opens folders. Windows does not, and syncs only files that are open for writing."""
_REPLACE_SECONDS, _PAUSE_SECONDS = 2.0, 0.01
_SAFETENSORS_DRAFT = re.compile(r"\.tmp[A-Za-z0-9]{6}")
"""Name of the temporary file that safetensors writes beside the final one."""


def atomic_write(path: Path, data: bytes | memoryview, *, private: bool = False) -> None:
    """Write `data` to `path` atomically; with `private`, readable for this user only."""
    with atomic_draft(path, private=private) as draft:
        draft.write_bytes(data)


@contextmanager
def atomic_draft(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a draft beside `path`, a file or a folder of files, and rename it to `path` when the block ends.

    File and name are then synced to the disk. If the block raises, the draft is removed, and an OSError that names no
    file names `path`.

    Args:
        path: path of the file, which is replaced, or of the folder, which must not exist.
        private: whether only this user may read the file, from its first byte on.
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
        _put_in_place(draft, path)
    except BaseException as error:
        _remove(draft)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or str(path)
        raise
    _sync(path.parent)


def _put_in_place(draft: Path, path: Path) -> None:
    """Rename `draft` to `path`; on Windows wait a moment while another thread or process has `path` open."""
    until = time.monotonic() + (0.0 if _SYNCS_FOLDERS else _REPLACE_SECONDS)
    while True:
        try:
            draft.replace(path)
            return
        except PermissionError:
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_SECONDS)


def remove_drafts(folder: Path, *, keep_living: bool = False) -> None:
    """Remove the drafts in `folder` of processes that died while they wrote, for its only writer.

    Args:
        folder: folder to search.
        keep_living: keep the drafts of other living processes of this machine: under torchrun the leading rank is not
            always the one that locked the folder.
    """
    for path in folder.glob(".*"):
        _, *numbers = path.name.rsplit(".", 2)
        is_ours = len(numbers) == 2 and all(map(str.isdecimal, numbers))
        if keep_living and is_ours and _is_other_living(int(numbers[0])):
            continue
        if is_ours or _SAFETENSORS_DRAFT.fullmatch(path.name):
            _remove(path)


def _is_other_living(pid: int) -> bool:
    """Return whether a process of this machine other than this one has the id `pid`."""
    import psutil  # loaded here: most commands write files and remove no drafts

    return pid != os.getpid() and psutil.pid_exists(pid)


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if not _SYNCS_FOLDERS and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if _SYNCS_FOLDERS else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
