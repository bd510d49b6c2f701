"""The shared memory of a forked replica: it has its own, so that the rank never sees what the replica writes.

    up to 64 MB, 256 MB in all    a copy
    larger, with a file           a copy of each page that the replica writes; others may show later changes of the rank
    larger, without a file        a copy, if the machine has twice as much memory left

Such memory belongs to `numpy.memmap`, to tensors after `share_memory_()`, and to `multiprocessing`. Only Linux says
where it is; elsewhere it stays shared.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evener.system.memory import usable_memory

_MAPS, _DESCRIPTORS = Path("/proc/self/maps"), Path("/proc/self/fd")
_MAX_COPY_BYTES, _MAX_COPIED_BYTES = 64 * 2**20, 256 * 2**20
"""Largest copy of one mapping, and of all together."""
_LINE = re.compile(r"(\w+)-(\w+) (r|-)w(x|-)s (\w+) \w+:\w+ (\d+) *(.*)")
_PROT_READ, _PROT_WRITE, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 2, 16, 32
"""Values of Linux."""


class _Mapping(NamedTuple):
    """Memory that other processes may share and this one may write.

    Attributes:
        start: address of its first byte.
        size: bytes.
        offset: of its first byte in the file.
        inode: of the file; 0 for none.
        path: of the file, which ends with " (deleted)" if it was removed.
    """

    start: int
    size: int
    offset: int
    inode: int
    path: str


def separate_shared_memory() -> None:
    """Replace shared memory by memory of this process alone, at the same addresses and with the same contents.

    Raises:
        OSError: it cannot be replaced.
    """
    copied = 0
    for mapping in _shared_mappings():
        is_small = mapping.size <= min(_MAX_COPY_BYTES, _MAX_COPIED_BYTES - copied)
        descriptor = None if is_small else _opened(mapping)
        if descriptor is None:
            _copy(mapping)
            copied += mapping.size
        else:
            _map(mapping.start, mapping.size, 0, descriptor, mapping.offset)
            os.close(descriptor)


def _copy(mapping: _Mapping) -> None:
    """Replace a mapping by a copy, a piece after the other. Raises OSError."""
    if mapping.size > usable_memory()[1] // 2:
        raise OSError(f"there is no memory for a copy of {mapping.size} shared bytes")
    for offset in range(0, mapping.size, _MAX_COPY_BYTES):
        start, size = mapping.start + offset, min(_MAX_COPY_BYTES, mapping.size - offset)
        contents = ctypes.string_at(start, size)
        _map(start, size, _MAP_ANONYMOUS, -1, 0)
        ctypes.memmove(start, contents, size)


def _shared_mappings() -> Iterator[_Mapping]:
    """Yield the shared mappings of this process that may be written."""
    lines = _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else []
    for match in filter(None, map(_LINE.fullmatch, lines)):
        start, end, _, _, offset, inode, path = match.groups()
        first = int(start, 16)
        yield _Mapping(first, int(end, 16) - first, int(offset, 16), int(inode), path)


def _opened(mapping: _Mapping) -> int | None:
    """Return a new descriptor of a mapping's file; None if it has none, or one that was removed and is not open here.

    Raises:
        OSError: the file cannot be opened.
    """
    if mapping.inode and not mapping.path.endswith(" (deleted)"):
        return os.open(mapping.path, os.O_RDONLY)
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it belonged to the listing
            if descriptor.stat().st_ino == mapping.inode and os.readlink(descriptor) == mapping.path:
                return os.open(descriptor, os.O_RDONLY)
    return None


def _map(start: int, size: int, flags: int, descriptor: int, offset: int) -> None:
    """Replace memory by private memory. Raises OSError."""
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
    where = mmap(start, size, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_FIXED | flags, descriptor, offset)
    if where != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
