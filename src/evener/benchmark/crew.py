"""Lets all cores work at once without waiting for each other.

PyTorch divides an operator among threads that meet at its end. Where other processes hold a core for a moment, every
such meeting waits for it: on a busy machine a call of 1 ms then takes 30 ms, always. Threads that each do their own
work lose only what is really taken from them: a median or quartile of many short calls is as on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def crew_size(device: torch.device) -> int:
    """How many threads it takes to use all of `device`: those of PyTorch on a CPU, one for a GPU."""
    return 1 if device.type == "cuda" else torch.get_num_threads()


def all_at_once(device: torch.device, work: Callable[[], T]) -> list[T]:
    """What each of `crew_size` threads returns that run `work` at the same time, with one thread an operator."""
    size = crew_size(device)
    if size == 1:
        return [work()]
    with _undivided_operators(), ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work) for _ in range(size)]]


@contextmanager
def _undivided_operators() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
