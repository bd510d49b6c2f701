"""A process that joins probes its lines to the others: it reports those that it reaches, or gives way."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from evener.config.options import PATIENCE
from evener.membership.generation import Probe, ReachedPeers
from evener.membership.line_probe import LineProbe
from evener.records.errors import EvenerError, LineCut, NodeLost
from support.stores import memory_store

SECONDS = 1.0


class Process:
    """A process of the run."""

    def __init__(self, number: int, store: Any, *, seconds: float = SECONDS) -> None:
        self.reached: SimpleQueue[ReachedPeers] = SimpleQueue()
        self.cut: SimpleQueue[EvenerError] = SimpleQueue()
        self.probe = LineProbe(
            node=f"n{number}",
            process=number,
            address="127.0.0.1",
            open_store=lambda: store,
            seconds=seconds,
            report=self.reached.put,
            give_way=self.cut.put,
        )
        self.probe.listen()
        self.port = int(store.get(f"line/{number}").decode().split()[1])


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    store, started = memory_store(), list[Process]()

    def one(number: int, **options: float) -> Process:
        started.append(Process(number, store, **options))
        return started[-1]

    yield one
    for process in started:
        process.probe.close()


def test_computing_processes_are_reachable(start: Callable[..., Process]) -> None:
    start(0)
    start(1)
    joining = start(7)
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(0, 1))
    assert joining.cut.empty()


def test_process_that_cannot_reach_another_leaves_and_names_both(start: Callable[..., Process]) -> None:
    start(0)
    gone, joining = start(1), start(7)
    gone.probe.close()
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    error = joining.cut.get(timeout=SECONDS + 5)
    assert type(error) is LineCut
    assert error.nodes == ("n7",)
    assert {"n7", "n1"} <= set(str(error).split())
    assert joining.reached.empty()


def test_link_restored_within_the_patience_is_reachable(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
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


def test_probe_of_a_lost_process_ends_without_a_result(start: Callable[..., Process]) -> None:
    gone, joining = start(0), start(7)
    start(1)
    gone.probe.close()
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    joining.probe.begin(Probe(nodes={1: "n1"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(1,))
    with pytest.raises(Empty):
        joining.cut.get(timeout=2 * SECONDS)


def test_reachable_link_is_probed_again_with_the_next_ones(start: Callable[..., Process]) -> None:
    first, joining = start(0), start(7)
    start(1)
    joining.probe.begin(Probe(nodes={0: "n0"}))
    assert joining.reached.get(timeout=5) == ReachedPeers(processes=(0,))
    first.probe.close()  # the line is cut
    joining.probe.begin(Probe(nodes={0: "n0", 1: "n1"}))
    assert type(joining.cut.get(timeout=SECONDS + 5)) is LineCut
    assert joining.reached.empty()


@pytest.mark.parametrize(
    "published", ["", "127.0.0.1", "127.0.0.1 x", "127.0.0.1 0", "a 70000", "a 1 2", b"\xff 1x", "\n 1"]
)
def test_node_with_an_invalid_published_address_is_named(published: str | bytes) -> None:
    store = memory_store()
    store.set("line/0", published)
    joining = Process(7, store)
    try:
        joining.probe.begin(Probe(nodes={0: "n0"}))
        error = joining.cut.get(timeout=5)
    finally:
        joining.probe.close()
    assert type(error) is NodeLost
    assert error.nodes == ("n0",)


FLOOD = """
import itertools, socket, sys
from collections import deque
newest = deque(maxlen=500)  # those before it are closed
for count in itertools.count():
    newest.append(socket.socket())
    newest[-1].setblocking(False)
    newest[-1].connect_ex(("127.0.0.1", int(sys.argv[1])))
    if count == 2 * socket.SOMAXCONN:
        print("flooded", flush=True)
"""


def test_flood_of_connections_blocks_no_probe(start: Callable[..., Process]) -> None:
    flooded, joining = start(0), start(7, seconds=PATIENCE)
    with subprocess.Popen([sys.executable, "-c", FLOOD, str(flooded.port)], stdout=subprocess.PIPE) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"flooded\n"
            for _ in range(3):
                joining.probe.begin(Probe(nodes={0: "n0"}))
                assert joining.reached.get(timeout=PATIENCE + 5) == ReachedPeers(processes=(0,))
            assert stranger.poll() is None
        finally:
            stranger.kill()
    assert joining.cut.empty()
