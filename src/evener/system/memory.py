"""How much memory a device has and leaves to this process, and what a container or a scheduler allows of it.

The main memory is bounded by Linux's control groups, of versions 1 and 2, in which the process is: the tightest counts.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

import psutil

from evener.records.errors import require
from evener.system.control_groups import groups_of
from evener.system.malloc import kept_bytes

_UNLIMITED = 1 << 60


class Memory(NamedTuple):
    """What a device has, or a control group allows.

    Attributes:
        total_bytes: all, or the limit.
        free_bytes: what is left of it; of a file's pages, those that can be dropped count as free.
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
    """The bytes that `device` has, and the bytes that this process may take of them now.

    Args:
        device: `cpu` or a GPU, as PyTorch names it; PyTorch is imported for a GPU only.
        limit_bytes: the user's own bound for this node.

    Returns:
        (total, usable), 1 <= usable <= total. What other processes hold is not usable; what this process holds neither,
        except for what it keeps without using it: the C library of main memory, PyTorch of a GPU's.

    Raises:
        InvalidValue: `limit_bytes` is not positive.
    """
    require(limit_bytes is None or limit_bytes > 0, "memory limit", limit_bytes, "positive")
    total, free = _gpu_memory(device) if device.startswith("cuda") else _cpu_memory()
    usable = min(total, free) if limit_bytes is None else min(total, free, limit_bytes)
    return total, max(1, usable)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether PyTorch raised `error` because a device or the main memory is full.

    Only PyTorch's own allocator raises `torch.OutOfMemoryError`. What drivers and libraries such as cuBLAS cannot
    allocate comes as another RuntimeError that says so.
    """
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _cpu_memory() -> Memory:
    memory = psutil.virtual_memory()
    bounds = [Memory(memory.total, memory.available), *memory_limits()]
    free = min(bound.free_bytes for bound in bounds) + kept_bytes()
    return Memory(min(bound.total_bytes for bound in bounds), free)


def _gpu_memory(device: str) -> Memory:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def peak_memory(device: str = "cpu") -> int:
    """The bytes that this process held at its peak until now: of a GPU's memory, or of main memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_limits() -> list[Memory]:
    """The limits of every memory control group that this process is in; empty where there are none."""
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
    """The value of `name` in lines of `name value`; 0 if it is not there."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)
