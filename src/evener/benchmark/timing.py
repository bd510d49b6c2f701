"""How work of a device is timed: by events in the stream of a GPU, by the wall clock elsewhere; on all cores at once.

PyTorch divides an operator among threads that meet at its end. Where other processes hold a core for a moment, every
such meeting waits for it: on a busy machine a call of 1 ms then takes 30 ms, always. Threads that each do their own
work lose only what is really taken from them: a median or quartile of many short calls is as on a quiet machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Moment = float | torch.cuda.Event


class DeviceClock:
    """The clock of one device.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Moment:
        """This moment; on a GPU the one at which the work queued so far is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Seconds between two marks; waits until the work before `end` is done."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that one call of `work` takes."""
        begin = self.mark()
        work()
        return self.seconds(begin, self.mark())


def now(device: torch.device) -> float:
    """The time in seconds, once all that `device` was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rounds(seconds: float, least: int, most: float = math.inf) -> Iterator[int]:
    """Numbers from 0, until the time is over; `least` of them in any case, and no more than `most`."""
    start, number = time.perf_counter(), 0
    while number < least or (number < most and time.perf_counter() - start < seconds):
        yield number
        number += 1


def num_workers(device: torch.device) -> int:
    """How many threads it takes to use all of `device`: those of PyTorch on a CPU, one for a GPU."""
    return 1 if device.type == "cuda" else torch.get_num_threads()


def run_threaded(device: torch.device, work: Callable[[], T]) -> list[T]:
    """What each of `num_workers` threads returns that run `work` at the same time, with one thread an operator."""
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
