"""How much memory a training run may take on a device, and how fast the device moves bytes."""

from __future__ import annotations

import time
from functools import partial

import psutil
import torch

from evener.benchmark.cgroup import memory_limits
from evener.benchmark.clock import Clock
from evener.benchmark.crew import all_at_once, crew_size
from evener.errors import require

_CPU_COPY_BYTES = 128 << 20
_CPU_PIECE_BYTES = 4 << 20
_GPU_COPY_BYTES = 1 << 30
_SHARE_OF_MEMORY = 8


def usable_memory(device: torch.device, limit_bytes: int | None = None) -> tuple[int, int]:
    """The bytes that `device` has, and the bytes that a training run may take of them now.

    Args:
        device: the CPU, whose memory control groups (containers, Slurm) may limit, or a GPU.
        limit_bytes: the user's own bound for this node.

    Returns:
        (total, usable), 1 <= usable <= total. What other processes hold is not usable; what this process holds neither,
        except for memory that PyTorch keeps on a GPU without using it.

    Raises:
        InvalidValue: `limit_bytes` is not positive.
    """
    require(limit_bytes is None or limit_bytes > 0, "memory limit", limit_bytes, "positive")
    total, free = _gpu_memory(device) if device.type == "cuda" else _cpu_memory()
    usable = min(total, free) if limit_bytes is None else min(total, free, limit_bytes)
    return total, max(1, usable)


def measure_bandwidth(device: torch.device, budget_seconds: float) -> float:
    """Bytes per second that `device` reads and writes, together, in copies larger than its caches.

    On a CPU each of PyTorch's threads copies memory of its own, all at the same time, and their rates are added (see
    `crew`). Pieces of 4 MB are timed one by one, cycling through memory, so that none is in a cache when its turn comes
    again; the fastest tenth counts, for on a shared machine strangers take of the same memory.

    Args:
        device: to measure.
        budget_seconds: after which the copying ends; every piece is copied at least twice.

    Raises:
        InvalidValue: the budget is not positive.
    """
    require(budget_seconds > 0, "budget_seconds", budget_seconds, "positive")
    room = usable_memory(device)[1] // _SHARE_OF_MEMORY // crew_size(device)
    return sum(all_at_once(device, lambda: _copy_rate(device, room, budget_seconds)))


def _copy_rate(device: torch.device, room_bytes: int, budget_seconds: float) -> float:
    """Bytes per second that the calling thread reads and writes, copying within `room_bytes`."""
    pieces = _pieces(device, room_bytes)
    clock, start, times = Clock(device), time.perf_counter(), list[float]()
    while len(times) < 2 * len(pieces) or time.perf_counter() - start < budget_seconds:
        times += [clock.time(partial(to.copy_, of)) for to, of in pieces]
    return 2 * pieces[0][0].nbytes / sorted(times)[len(times) // 10]


def _pieces(device: torch.device, room_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs to copy (to, from), all of one size, together as large as is of use and has room."""
    whole = min(_GPU_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES, room_bytes)
    piece = whole // 2 if device.type == "cuda" else min(_CPU_PIECE_BYTES, whole // 2)
    count, elements = max(1, whole // 2 // max(1, piece)), max(1, piece // 4)
    target, source = (torch.full((count, elements), value, device=device) for value in (0.0, 1.0))
    return list(zip(target.unbind(), source.unbind(), strict=True))


def _cpu_memory() -> tuple[int, int]:
    memory, limits = psutil.virtual_memory(), memory_limits()
    total = min([memory.total, *(limit.total_bytes for limit in limits)])
    return total, min([memory.available, *(limit.free_bytes for limit in limits)])


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
