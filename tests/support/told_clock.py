"""A clock for what measures and idles: it moves when it is told to, however busy the machine is."""

from __future__ import annotations

import pytest


class Clock:
    """Wall clock, processor clock and sleep that only move when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.busy = 0.0
        self.slept: list[float] = []
        for name in ("perf_counter", "thread_time", "sleep"):
            monkeypatch.setattr(f"time.{name}", getattr(self, name))

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.busy

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.wall += seconds

    def compute(self, seconds: float, others: float = 0.0) -> None:
        self.busy += seconds
        self.wall += seconds + others


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
