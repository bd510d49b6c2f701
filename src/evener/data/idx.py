"""IDX files, the format of MNIST: a magic number, the dimensions, then the elements; gzipped or plain."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.errors import InvalidFile, MissingFile

ELEMENTS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Third byte of the magic number -> NumPy type of an element, big-endian."""

MOST_DIMENSIONS = 32


def read_idx(path: Path) -> NDArray[Any]:
    """The array in the IDX file `path`, with the shape and element type that its header states.

    A file that begins like gzip is unpacked, whatever its name. The array is writable and in native byte order.

    Args:
        path: the file, gzipped or plain.

    Raises:
        MissingFile: the file cannot be read.
        InvalidFile: it is not IDX, is damaged, or holds fewer or more bytes than its header states.
    """
    data = _unpack(path, _read(path))
    kind, shape, start = _header(path, data)
    expected = math.prod(shape) * kind.itemsize
    if len(data) - start != expected:
        size = "x".join(map(str, shape))
        raise InvalidFile(
            f"{path} holds {len(data) - start} bytes of elements; its header ({size} of {kind.name}) "
            f"states {expected}: fetch it again"
        )
    return np.frombuffer(data, dtype=kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from error


def _unpack(path: Path, data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidFile(f"{path} is a damaged gzip file ({error}): fetch it again") from error


def _header(path: Path, data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Element type, shape, and the position of the first element."""
    magic = data[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in ELEMENTS or not 1 <= magic[3] <= MOST_DIMENSIONS:
        raise InvalidFile(
            f"{path} is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}; expected 00 00, "
            f"an element type ({', '.join(f'{code:02x}' for code in ELEMENTS)}) "
            f"and 01 to {MOST_DIMENSIONS:02x} dimensions"
        )
    start = 4 + 4 * magic[3]
    if len(data) < start:
        raise InvalidFile(f"{path} ends inside its header: {len(data)} bytes, expected {start} or more: fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(data, dtype=">u4", count=magic[3], offset=4))
    return np.dtype(ELEMENTS[magic[2]]), shape, start
