"""Other processes are distinguished from nodes that share a core and from a node that idles."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from evener.benchmark.processor_time import ProcessorTime, ProcessorWatch, busy_sentence, taken_by_others


def had(node: str, ran: float, waited: float, *cores: int) -> ProcessorTime:
    return ProcessorTime(node=node, cores=cores, ran=ran, waited=waited)


@pytest.mark.parametrize(
    ("times", "shares"),
    [
        ([had("a", 2.0, 0.0)], {"a": 0.0}),
        ([had("a", 1.0, 3.0)], {"a": 0.75}),
        ([had("a", 1.0, 1.0, 0), had("b", 1.0, 1.0, 0)], {"a": 0.0, "b": 0.0}),
        ([had("a", 1.0, 3.0, 0), had("b", 1.0, 0.5, 0)], {"a": 2 / 3, "b": 0.0}),
        ([had("a", 1.0, 1.0, 0), had("b", 1.0, 0.0, 1)], {"a": 0.5, "b": 0.0}),
        ([had("a", 0.0, 0.0)], {"a": 0.0}),
    ],
    ids=["idle", "strangers", "neighbours on a core", "both", "another core", "nothing counted"],
)
def test_shares_match_literal_values(times: list[ProcessorTime], shares: dict[str, float]) -> None:
    assert taken_by_others(times) == pytest.approx(shares)


def test_warning_names_only_busy_nodes() -> None:
    assert busy_sentence({"a": 0.05, "b": 0.02}) == ""
    said = busy_sentence({"a": 0.05, "b": 0.431})
    assert "43% of the CPU time on b" in said


def test_watch_counts_this_thread_since_its_start(tmp_path: Path) -> None:
    counts = tmp_path / "schedstat"
    counts.write_text("5000000000 1000000000 7\n")
    watch = ProcessorWatch("a", (0,), counts)
    counts.write_text("6500000000 1250000000 9\n")
    assert watch.stop() == had("a", 1.5, 0.25, 0)
    assert ProcessorWatch("a", (), tmp_path / "none").stop() == had("a", 0.0, 0.0)


def test_kernel_counts_computing_and_not_sleeping_of_this_thread() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not count")
    watch, begin = ProcessorWatch("a"), time.thread_time()
    while time.thread_time() - begin < 0.05:
        pass
    threading.Event().wait(0.05)
    had = watch.stop()
    assert had.ran == pytest.approx(time.thread_time() - begin, abs=0.02)
