"""How fast a device moves bytes."""

from __future__ import annotations

import time
from functools import partial

import torch

from evener.benchmark.clock import Clock
from evener.benchmark.crew import all_at_once, crew_size
from evener.errors import require
from evener.memory import usable_memory

_CPU_COPY_BYTES = 128 << 20
_CPU_PIECE_BYTES = 4 << 20
_GPU_COPY_BYTES = 1 << 30
_SHARE_OF_MEMORY = 8


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
    room = usable_memory(str(device))[1] // _SHARE_OF_MEMORY // crew_size(device)
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
