"""Marks moments of a device's work: by events in the stream of a GPU, by the wall clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Moment = float | torch.cuda.Event


class Clock:
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
