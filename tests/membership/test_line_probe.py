"""A process that joins probes its lines to the others: it reports those that it reaches, or gives way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from evener.membership.generation import Probe, ReachedPeers
from evener.membership.line_probe import LineProbe
from evener.records.errors import EvenerError, LineCut
from support.stores import memory_store

SECONDS = 1.0


class Process:
    """A process of the run."""

    def __init__(self, number: int, store: Any) -> None:
        self.reached: SimpleQueue[ReachedPeers] = SimpleQueue()
        self.cut: SimpleQueue[EvenerError] = SimpleQueue()
        self.probe = LineProbe(
            node=f"n{number}",
            process=number,
            address="127.0.0.1",
            open_store=lambda: store,
            seconds=SECONDS,
            report=self.reached.put,
            give_way=self.cut.put,
        )
        self.probe.listen()


@pytest.fixture
def start() -> Iterator[Callable[[int], Process]]:
    store, started = memory_store(), list[Process]()

    def one(number: int) -> Process:
        started.append(Process(number, store))
        return started[-1]

    yield one
    for process in started:
        process.probe.close()


def test_processes_that_compute_are_reached(start: Callable[[int], Process]) -> None:
    first, second, joining = start(0), start(1), start(7)
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(0, 1))
    for process in (first, second):
        process.probe.drain()
    assert joining.cut.empty()


def test_a_process_that_does_not_reach_another_gives_way_and_names_both(start: Callable[[int], Process]) -> None:
    start(0)
    gone, joining = start(1), start(7)
    gone.probe.close()
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    error = joining.cut.get(timeout=SECONDS + 5)
    assert type(error) is LineCut
    assert error.nodes == ("n7",)
    assert {"n7", "n1"} <= set(str(error).split())
    assert joining.reached.empty()


def test_a_line_that_works_again_within_the_patience_is_reached(
    start: Callable[[int], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, tries = socket.create_connection, list[float]()

    def fail_once(*arguments: Any, **options: Any) -> socket.socket:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise OSError("no route to host")
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", fail_once)
    start(0)
    joining = start(7)
    joining.probe.begin(Probe(nodes={0: "n0"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(0,))
    assert len(tries) == 2


def test_a_probe_of_a_lost_process_ends_without_a_verdict(start: Callable[[int], Process]) -> None:
    gone, joining = start(0), start(7)
    start(1)
    gone.probe.close()
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    joining.probe.begin(Probe(nodes={1: "n1"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(1,))
    with pytest.raises(Empty):
        joining.cut.get(timeout=2 * SECONDS)
