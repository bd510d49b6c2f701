"""Reading of files that users name, which may be devices without an end."""

from __future__ import annotations

import codecs
import os
import select
import stat
from pathlib import Path

from evener.records.errors import InvalidFile

_WRITER_TIMEOUT_S = 3.0
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)
"""Opens a pipe before a process writes into it; 0 on Windows, whose pipes have no paths among files."""


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file without the byte order mark that editors on Windows write.

    Args:
        path: of the file.
        max_bytes: limit of its size.

    Raises:
        InvalidFile: it is larger, or a pipe into which no process writes.
        OSError: it cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | _WITHOUT_WAITING), "rb") as file:
        if _WITHOUT_WAITING:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                _await_writer(path, file.fileno())
            os.set_blocking(file.fileno(), True)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidFile(f"{path} is larger than the limit of {max_bytes / 2**20:g} MiB: name another file")
    return data.removeprefix(codecs.BOM_UTF8)


def _await_writer(path: Path, descriptor: int) -> None:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if not waiting.poll(1000 * _WRITER_TIMEOUT_S):
        raise InvalidFile(f"no process writes into the pipe {path} within {_WRITER_TIMEOUT_S:g} s: name a file")
