"""The shared memory of a forked replica: it has its own, so that the rank never sees what the replica writes.

    up to 64 MB, 256 MB in all    a copy, which all mappings of the same memory share
    larger, with a file           a copy of each page that the replica writes; others may show later changes of the rank
    larger, without a file        a copy, if the machine has twice as much memory left

Such memory belongs to `numpy.memmap`, to tensors after `share_memory_()`, and to `multiprocessing`, where a lock that
another process holds stays locked in the replica. Only Linux says where it is; elsewhere it stays shared.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evener.system.memory import usable_memory

_MAPS, _MEMORY, _DESCRIPTORS = Path("/proc/self/maps"), Path("/proc/self/mem"), Path("/proc/self/fd")
_MAX_COPY_BYTES, _MAX_COPIED_BYTES = 64 * 2**20, 256 * 2**20
"""Largest copy of the memory of one file, and of all together."""
_LINE = re.compile(r"(\w+)-(\w+) (...)s (\w+) (\w+:\w+ \d+) *(.*)")
_PIECE_BYTES = 16 * 2**20
"""Size of the pieces in which memory is copied."""
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 1, 2, 16
"""Values of Linux."""


class _Mapping(NamedTuple):
    """Memory that other processes may share.

    Attributes:
        start: address of its first byte.
        size: bytes.
        protection: whether it may be read, written, executed, as bits of mmap(2).
        offset: of its first byte in the file.
        path: of the file, which ends with " (deleted)" if it was removed.
    """

    start: int
    size: int
    protection: int
    offset: int
    path: str


def separate_shared_memory() -> None:
    """Replace shared memory by memory of this process alone, at the same addresses and with the same contents.

    Raises:
        OSError: it cannot be replaced.
    """
    copied = 0
    for inode, mappings in _written_files().items():
        size = max(one.offset + one.size for one in mappings) - min(one.offset for one in mappings)
        is_small = size <= min(_MAX_COPY_BYTES, _MAX_COPIED_BYTES - copied)
        descriptor = None if is_small else _opened(inode, mappings[0].path)
        kind = _MAP_SHARED if descriptor is None else _MAP_PRIVATE
        if descriptor is None:
            descriptor, copied = _copied(mappings, size), copied + size
        for one in mappings:
            _map(one, kind, descriptor)
        os.close(descriptor)


def _written_files() -> dict[str, list[_Mapping]]:
    """Return the shared mappings of each file that this process may write through one of them, by device and inode."""
    files = defaultdict[str, list[_Mapping]](list)
    lines = _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else []
    for match in filter(None, map(_LINE.fullmatch, lines)):
        start, end, letters, offset, inode, path = match.groups()
        protection = sum(bit for bit, letter in zip((1, 2, 4), letters, strict=True) if letter != "-")
        first = int(start, 16)
        files[inode].append(_Mapping(first, int(end, 16) - first, protection, int(offset, 16), path))
    return {inode: mappings for inode, mappings in files.items() if any(one.protection & 2 for one in mappings)}


def _copied(mappings: Sequence[_Mapping], size: int) -> int:
    """Return the descriptor of a new file without a name that has the contents of all mappings. Raises OSError."""
    if size > usable_memory()[1] // 2:
        raise OSError(f"there is no memory for a copy of {size} shared bytes")
    descriptor = os.memfd_create("evener")
    os.ftruncate(descriptor, max(one.offset + one.size for one in mappings))
    with _MEMORY.open("rb", buffering=0) as memory:
        for one in mappings:
            for begin in range(0, one.size, _PIECE_BYTES):
                with suppress(OSError):  # the file has become shorter, so this piece cannot be read
                    piece = os.pread(memory.fileno(), min(_PIECE_BYTES, one.size - begin), one.start + begin)
                    os.pwrite(descriptor, piece, one.offset + begin)
    return descriptor


def _opened(inode: str, path: str) -> int | None:
    """Return a new descriptor of a file; None if it has no name, or was removed and is not open here.

    Raises:
        OSError: the file cannot be opened.
    """
    if path and not path.endswith(" (deleted)"):
        return os.open(path, os.O_RDONLY)
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it belonged to the listing
            if descriptor.stat().st_ino == int(inode.split()[1]) and os.readlink(descriptor) == path:
                return os.open(descriptor, os.O_RDONLY)
    return None


def _map(mapping: _Mapping, kind: int, descriptor: int) -> None:
    """Map a file in place of shared memory. Raises OSError."""
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
    start, size, protection, offset, _ = mapping
    if mmap(start, size, protection, kind | _MAP_FIXED, descriptor, offset) != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
