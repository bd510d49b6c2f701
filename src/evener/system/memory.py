"""The memory of a device, the part that this process may use, and limits of a container or a scheduler.

The main memory is limited by the Linux control groups, versions 1 and 2, of the process: the tightest limit counts.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import psutil

from evener.records.errors import require, text_of
from evener.system.control_groups import groups_of
from evener.system.malloc import kept_bytes

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_UNLIMITED = 1 << 60


class Memory(NamedTuple):
    """Memory of a device, or the limit of a control group.

    Attributes:
        total_bytes: all memory, or the limit.
        free_bytes: free part of it; cached pages of files that can be dropped count as free.
    """

    total_bytes: int
    free_bytes: int


class _Files(NamedTuple):
    limit: str
    usage: str
    droppable: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def usable_memory(device: str = "cpu", limit_bytes: int | None = None) -> tuple[int, int]:
    """Return the bytes of `device`, and the bytes of them that this process may take now.

    Args:
        device: `cpu` or an accelerator, as PyTorch names it; PyTorch is imported for an accelerator only.
        limit_bytes: the user's own limit for this node.

    Returns:
        (total, usable), 1 <= usable <= total. Memory of other processes is not usable, nor is memory that this process
        uses; memory that it holds without using it is: in the C library, and in PyTorch on an accelerator.

    Raises:
        InvalidValue: `limit_bytes` is not positive.
    """
    require(limit_bytes is None or limit_bytes > 0, "memory limit", limit_bytes, "positive")
    total, free = (None if device == "cpu" else _accelerator_memory(device)) or _cpu_memory()
    usable = min(total, free) if limit_bytes is None else min(total, free, limit_bytes)
    return total, max(1, usable)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether PyTorch raised `error` because a device or the main memory is full.

    Only PyTorch's own allocator raises `torch.OutOfMemoryError`. Failed allocations of drivers and libraries such as
    cuBLAS raise another RuntimeError with such a message.
    """
    return isinstance(error, RuntimeError) and any(phrase in text_of(error) for phrase in _OUT_OF_MEMORY)


def _cpu_memory() -> Memory:
    memory = psutil.virtual_memory()
    bounds = [Memory(memory.total, memory.available), *memory_limits()]
    free = min(bound.free_bytes for bound in bounds) + kept_bytes()
    return Memory(min(bound.total_bytes for bound in bounds), free)


def _accelerator_memory(device: str) -> Memory | None:
    """Return the memory of an accelerator; None if it uses the main memory."""
    import torch

    from evener.system import accelerators

    own = accelerators.memory(torch.device(device))
    return None if own is None else Memory(*own)


def peak_memory(device: str = "cpu") -> int:
    """Return the peak memory of this process in bytes: of an accelerator that counts it, or main memory."""
    if device != "cpu":
        import torch

        from evener.system import accelerators

        if accelerators.capabilities(device).counts_memory:
            return accelerators.peak_bytes(torch.device(device))
    if resource is None:
        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kilobytes


def memory_limits() -> list[Memory]:
    """Return the limits of all memory control groups of this process; empty without limits."""
    limits = []
    for group in groups_of("memory"):
        files = _VERSION_1 if group.version == 1 else _VERSION_2
        total, usage = _number(group.read(files.limit)), _number(group.read(files.usage))
        if total is not None and total < _UNLIMITED:
            droppable = _statistic(group.read("memory.stat"), files.droppable)
            limits.append(Memory(total, min(total, max(0, total - (usage or 0) + droppable))))
    return limits


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _statistic(text: str, name: str) -> int:
    """Return the value of `name` in lines of `name value`; 0 if there is none."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)
