"""Memory that a training frees stays with its process, which takes it again in the next step.

By itself the C library hands large pieces back to the system as soon as they are freed. In a training they are wanted
again at once, and the system fills them with zeros, page by page, before it gives them: on a processor that takes up to
a third of a step. PyTorch keeps the memory of GPUs for the same reason.

Source: mallopt(3) and mallinfo2(3), of glibc; other C libraries have neither.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE_BYTES = 2 * 2**20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables by which a user tells glibc what to do."""


class _Mallinfo2(ctypes.Structure):
    """What glibc says of the memory that it manages; `fordblks` are the bytes that are free."""

    _before = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_before, "fordblks", "keepcost"))


def keep_freed_memory() -> None:
    """Have this process keep what it frees, until it ends; nothing happens where the user or the system has other ways.

    It may hold a fifth more at its peak than it would: what is free lies in pieces.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _SETTINGS) or "malloc.trim_" in tunables or "malloc.mmap_" in tunables:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_TRIM_THRESHOLD, -1)
        library.mallopt(_M_MMAP_MAX, 0)


def return_large_memory() -> None:
    """Have this process give pieces of some megabytes back to the system as soon as they are freed.

    By itself the C library raises the size from which on it does so up to 32 MB with every such piece that is freed, so
    that a server keeps what its largest messages took. Nothing happens where the user has said something else.
    """
    library = ctypes.CDLL(None)
    if not any(name in os.environ for name in _SETTINGS) and hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """Give the system back what this process has freed, after something large that does not come often."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def kept_bytes() -> int:
    """That this process has freed and still holds: the system does not count them as free, and it can take them again.

    0 where the C library cannot tell: that of glibc can from version 2.33 on.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo2
    return int(library.mallinfo2().fordblks)
