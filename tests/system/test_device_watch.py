"""A device that finishes nothing any more is noticed; one that works, however slowly, is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from evener.system import accelerators
from evener.system.device_watch import FIRST_SECONDS, DeviceWatch

PATIENCE = 0.1
LIMIT = 4 * PATIENCE


class Rank:
    """A rank whose steps last as a test says, on a device that answers unless it hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hung = threading.Event()
        self.said: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        monkeypatch.setattr(accelerators, "synchronize", self._synchronize)
        self.watch = DeviceWatch(torch.device("cpu"), PATIENCE, self._hang)

    def _hang(self, why: str) -> None:
        self.said.append(why)
        self.hung.set()

    def _synchronize(self, _: torch.device) -> None:
        self.asked += 1
        if not self.answers.wait(20):
            raise RuntimeError("lost")

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.watch.at_step()
            time.sleep(seconds)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    one = Rank(monkeypatch)
    one.watch.start()
    yield one
    one.watch.stop()
    one.answers.set()


def test_device_that_hangs_after_some_steps_is_reported_once(rank: Rank) -> None:
    rank.steps(8, 0.03)
    rank.answers.clear()
    assert rank.hung.wait(10)
    time.sleep(LIMIT)
    (why,) = rank.said
    assert why in {f"it has finished nothing for {second} s" for second in range(6)}


def test_device_that_answers_is_waited_for(rank: Rank) -> None:
    rank.steps(8, 0.03)
    time.sleep(4 * LIMIT)
    assert rank.asked > 2
    assert not rank.hung.is_set()


def test_limit_is_six_of_the_longest_steps_and_long_before_the_second(rank: Rank) -> None:
    assert rank.watch.limit == FIRST_SECONDS
    rank.steps(1, 0.3)  # compiles, say
    assert rank.watch.limit == FIRST_SECONDS
    rank.steps(6, 0.15)
    assert 0.8 < rank.watch.limit < 8


def test_lost_device_is_left_to_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)

    def lost(_: torch.device) -> None:
        raise RuntimeError("device 0 is lost")

    monkeypatch.setattr(accelerators, "synchronize", lost)
    rank.watch.start()
    rank.steps(8, 0.03)
    time.sleep(2 * LIMIT)
    rank.watch.stop()
    assert not rank.hung.is_set()


def test_device_that_answers_late_has_hung_only_if_no_step_was_made(rank: Rank) -> None:
    rank.steps(8, 0.03)
    rank.answers.clear()
    threading.Timer(LIMIT * 0.7, lambda: rank.steps(1, 0)).start()  # asked at half of the limit
    threading.Timer(LIMIT * 0.9, rank.answers.set).start()
    time.sleep(1.5 * LIMIT)
    assert not rank.hung.is_set()
