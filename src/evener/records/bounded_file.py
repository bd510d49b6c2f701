"""Reading of files that users name, which may be devices without an end."""

from __future__ import annotations

import codecs
from pathlib import Path

from evener.records.errors import InvalidFile


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file without the byte order mark that editors on Windows write.

    Args:
        path: of the file.
        max_bytes: limit of its size.

    Raises:
        InvalidFile: it is larger.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidFile(f"{path} is larger than the limit of {max_bytes / 2**20:g} MiB: name another file")
    return data.removeprefix(codecs.BOM_UTF8)
