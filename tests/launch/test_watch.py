"""Who is silent: a pure table, and a watch on a real store."""

import threading
import time

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evener.launch.watch import Beat, Watch, last_step, parse_beat, silent_ranks


def beats(*since: float) -> list[Beat]:
    return [Beat(count=1, step=3, since=s) for s in since]


@pytest.mark.parametrize(
    ("since", "now", "silent"),
    [
        ((10.0, 10.0), 11.0, []),
        ((10.0, 4.9), 10.0, [1]),
        ((10.0, 5.0), 10.0, []),
        ((1.0, 2.0, 9.0), 10.0, [0, 1]),
    ],
)
def test_silence_is_a_count_that_has_not_grown_for_the_patience(
    since: tuple[float, ...], now: float, silent: list[int]
) -> None:
    assert silent_ranks(beats(*since), now, patience=5.0) == silent


def test_a_beat_reads_back() -> None:
    assert parse_beat(b"12:345") == (12, 345)


def test_a_rank_that_stops_beating_is_named_with_node_rank_and_step() -> None:
    store, lost = HashStore(), list[str]()
    watch = Watch(store, rank=0, nodes=["a", "b"], patience=0.4, on_lost=lost.append)
    watch.start()
    for count in range(1, 9):
        store.set("beat/1", f"{count}:7")
        time.sleep(0.1)
    assert not lost
    watch.join(timeout=5)
    assert lost == ["node b (rank 1) has been silent for 0.4 s, at step 7; node a waited for it"]
    assert last_step(store, 1) == 7
    assert last_step(store, 0) == 0


def test_a_failure_that_a_rank_reports_reaches_the_others_at_once() -> None:
    store, lost = HashStore(), list[str]()
    watch = Watch(store, rank=0, nodes=["a", "b"], patience=60, on_lost=lost.append)
    Watch(store, rank=1, nodes=["a", "b"], patience=60, on_lost=print).report_failure("node b ran out of memory")
    watch.start()
    watch.join(timeout=5)
    assert lost == ["node b ran out of memory"]


def test_a_stopped_watch_says_nothing() -> None:
    lost = list[str]()
    watch = Watch(HashStore(), rank=0, nodes=["a", "b"], patience=0.2, on_lost=lost.append)
    watch.start()
    watch.stop()
    time.sleep(0.5)
    assert all(thread.name != "evener-watch" for thread in threading.enumerate())
    assert not lost
