"""Times work of a device: by events in the queue of an accelerator, by the wall clock elsewhere; on all cores at once.

PyTorch divides an operator among threads that synchronise at its end. If another process holds a core for a moment,
every operator waits for it: on a busy machine a call of 1 ms then always takes 30 ms. Threads that each do their own
work lose only the time that is taken from them. The median or quartile of many short calls is then as on an idle
machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from evener.system import accelerators

T = TypeVar("T")
Moment = float | torch.Event


class DeviceClock:
    """The clock of one device.

    Args:
        device: device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Moment:
        """Return the present moment; on an accelerator, the moment at which its queued work is done."""
        return accelerators.marked(self.device) or now(self.device)

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Return the seconds between two marks; waits until the work before `end` is done."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call of `work`."""
        begin = self.mark()
        work()
        return self.seconds(begin, self.mark())


def now(device: torch.device) -> float:
    """Return the time in seconds, once `device` has finished its queued work."""
    accelerators.synchronize(device)
    return time.perf_counter()


def rounds(seconds: float, min_rounds: int, max_rounds: float = math.inf) -> Iterator[int]:
    """Yield numbers from 0 until the time is over, at least `min_rounds` and at most `max_rounds`."""
    start, number = time.perf_counter(), 0
    while number < min_rounds or (number < max_rounds and time.perf_counter() - start < seconds):
        yield number
        number += 1


def num_workers(device: torch.device) -> int:
    """Return the number of threads that use all of `device`: PyTorch's threads on a CPU, one for an accelerator."""
    return 1 if accelerators.is_accelerator(device) else torch.get_num_threads()


def run_threaded(device: torch.device, work: Callable[[], T]) -> list[T]:
    """Return the results of `num_workers` threads that run `work` at the same time, with one thread per operator."""
    size = num_workers(device)
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
