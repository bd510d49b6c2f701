"""Settings of glibc's malloc, so that memory that a training frees stays with its process for the next step.

By default the C library returns large blocks to the system as soon as they are freed. A training needs them again at
once, and the system fills them with zeros, page by page: on a CPU that takes up to a third of a step. PyTorch keeps the
memory of GPUs for the same reason.

Source: mallopt(3) and mallinfo2(3), of glibc; other C libraries have neither.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE_BYTES = 2 * 2**20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables with which a user configures glibc."""


class _Mallinfo2(ctypes.Structure):
    """Statistics of the memory that glibc manages; `fordblks` is the number of free bytes."""

    _before = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_before, "fordblks", "keepcost"))


def _c_library() -> Any:
    """Return the C library of this process; an object without functions on Windows, where it has no name."""
    return ctypes.CDLL(None) if os.name == "posix" else object()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees; do nothing if the user has other settings, or without glibc.

    The peak may grow by a fifth, since free memory is fragmented.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _SETTINGS) or "malloc.trim_" in tunables or "malloc.mmap_" in tunables:
        return
    library = _c_library()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_TRIM_THRESHOLD, -1)
        library.mallopt(_M_MMAP_MAX, 0)


def return_large_memory() -> None:
    """Let this process return blocks of some megabytes to the system as soon as they are freed.

    By default the C library raises this limit with every such block, up to 32 MB, so that a server keeps the memory of
    its largest messages. Do nothing if the user has other settings.
    """
    library = _c_library()
    if not any(name in os.environ for name in _SETTINGS) and hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Return free memory to the system, after something large and rare."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def kept_bytes() -> int:
    """Return the bytes that this process has freed but not returned to the system, and can use again.

    Return 0 where the C library does not know it: glibc does from version 2.33 on.
    """
    library = _c_library()
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo2
    return int(library.mallinfo2().fordblks)
