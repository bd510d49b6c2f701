"""Ranks in threads follow generations: who waits for somebody who is gone goes on with the others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from evener.comm.abortable import GlooPlace
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.membership.control_channel import ControlChannel
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Beat, Generation, Heard, Participant, decode_for_coordinator, encode_message
from evener.membership.rendezvous import Connections, Rendezvous
from evener.records.errors import EvenerError, NodeLost
from support.stores import memory_store

PATIENCE = 4.0


class Rank:
    """A process that takes part, in this one: its group, and the coordinator's end of its line."""

    def __init__(self, process: int, store: object) -> None:
        self.said: SimpleQueue[bytes] = SimpleQueue()
        self.heard: SimpleQueue[bytes | None] = SimpleQueue()
        self.ended: SimpleQueue[EvenerError] = SimpleQueue()
        self.group = Group(rank=0, size=1, device=torch.device("cpu"), nodes=[""], timer=StepTimer(torch.device("cpu")))
        line = ControlChannel(
            process=process, node=f"n{process}", is_late=False, send=self.said.put, receive=self._receive,
            open_store=lambda: store, end=self.ended.put, patience=PATIENCE,
        )  # fmt: skip
        self.founded = SimpleQueue[bool]()
        self.changing = ElasticGroup(line, self.group, "127.0.0.1", lambda: self.founded.put(True))
        self.changing.start(("n0", "n1", "n2"))

    def tell(self, message: Generation | Heard) -> None:
        """As the coordinator."""
        self.heard.put(encode_message(message))

    def hang_up(self) -> None:
        """As a coordinator that ends; the process's threads end with it."""
        self.heard.put(None)
        assert isinstance(self.ended.get(timeout=5), NodeLost)

    def _receive(self) -> bytes:
        data = self.heard.get()
        if data is None:
            raise EOFError
        return data


def generation(number: int, *processes: int, is_urgent: bool = True) -> Generation:
    """Of these processes."""
    present = tuple(Participant(process=p, node=f"n{p}", since=1) for p in processes)
    return Generation(number=number, participants=present, reason=f"generation {number}", is_urgent=is_urgent)


def test_survivors_abort_collectives_with_a_lost_rank_and_continue() -> None:
    store = memory_store()
    ranks = [Rank(process, store) for process in range(3)]
    begun = threading.Barrier(3)

    def live(rank: Rank) -> list[bytes]:
        own = b"%d" % ranks.index(rank)
        rank.changing.enter()
        assert rank.group.all_gather_bytes(own) == [b"0", b"1", b"2"]
        total = rank.group.sum_later(torch.ones(2), "test").wait()
        assert total.tolist() == [3.0, 3.0]
        begun.wait(5)
        if rank is ranks[0]:
            return []  # it is frozen
        small, large = partial(rank.group.all_gather_bytes, own), rank.group.sum_later(torch.ones(2), "test").wait
        with pytest.raises((NodeLost, RuntimeError)) as caught:
            small() if rank is ranks[1] else large()
        rank.changing.require_broken(caught.value)
        rank.changing.enter()
        assert (rank.group.size, rank.group.nodes) == (2, ["n1", "n2"])
        return rank.group.all_gather_bytes(own)

    with ThreadPoolExecutor(3) as threads:
        lives = [threads.submit(live, rank) for rank in ranks]
        for rank in ranks:
            rank.tell(generation(1, 0, 1, 2))
        assert lives[0].result(timeout=10) == []
        time.sleep(0.1)  # the others are waiting
        since = time.monotonic()
        for rank in ranks:
            rank.tell(generation(2, 1, 2))
        assert [one.result(timeout=10) for one in lives[1:]] == [[b"1", b"2"]] * 2
        assert time.monotonic() - since < PATIENCE
    assert "node n0 was dropped by the run" in str(ranks[0].ended.get(timeout=5))
    for rank in ranks[1:]:
        rank.hang_up()


def test_coordinator_alone_detects_silence_once_a_generation_exists() -> None:
    store = memory_store()
    rank, frozen = (Rank(process, store) for process in range(2))
    with ThreadPoolExecutor(1) as threads:
        entered = threads.submit(rank.changing.enter)
        with pytest.raises(Empty):
            rank.founded.get(timeout=0.3)
        rank.tell(generation(1, 0, 1))
        assert rank.founded.get(timeout=5)  # it waits for the other one, whose own heartbeat would end it
        rank.tell(generation(2, 0))
        assert entered.result(timeout=10).nodes == ["n0"]
    assert rank.founded.empty()
    for one in (rank, frozen):
        one.hang_up()


def test_resumed_rank_updates_nothing_before_the_coordinator_answers() -> None:
    rank = Rank(0, dist.HashStore())  # type: ignore[attr-defined]
    passed = threading.Event()

    def update() -> None:
        rank.changing.fence()
        passed.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not passed.wait(0.2)
    while not passed.is_set():
        message = decode_for_coordinator(rank.said.get(timeout=5))
        if isinstance(message, Beat):
            rank.tell(Heard(count=message.count))
        passed.wait(0.05)
    thread.join()
    rank.hang_up()


def test_rank_reports_changes_since_the_last_report() -> None:
    rank = Rank(0, dist.HashStore())  # type: ignore[attr-defined]
    rank.tell(generation(1, 0))
    rank.changing.enter()
    for number in (2, 3):
        rank.tell(replace(generation(number, 0), lost=(f"n{number}",)))
    while rank.changing.number < 3:
        rank.changing.enter()
    began = rank.changing.what_began()
    assert (began.number, began.reason, began.lost) == (3, "generation 2, generation 3", ("n2", "n3"))
    rank.changing.has_told()
    rank.tell(generation(4, 0, is_urgent=False))
    rank.changing.enter()
    assert rank.changing.what_began().reason == "generation 4"
    rank.hang_up()


def test_error_without_a_lost_rank_is_raised() -> None:
    rank = Rank(0, dist.HashStore())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        rank.changing.require_broken(RuntimeError("a bug of the user's"))
    rank.hang_up()


def await_the_end_of_rendezvous(seconds: float) -> None:
    """No thread of a rendezvous remains."""
    deadline = time.monotonic() + seconds
    while any(thread.name == "evener-elastic-rendezvous" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [0, 1], ids=["waits to be called", "waits for an address"])
def test_rendezvous_without_its_peer_ends_soon_after_leave(rank: int) -> None:
    changed = threading.Condition()
    rendezvous = Rendezvous(generation(1, 0, 1), rank, memory_store, "127.0.0.1", changed)
    time.sleep(0.1)
    with changed:
        assert not rendezvous.has_ended
        rendezvous.leave()
        assert changed.wait_for(lambda: rendezvous.has_ended, 10)
    assert isinstance(rendezvous.error, NodeLost)
    await_the_end_of_rendezvous(10)


def test_rendezvous_waiting_for_the_gloo_mesh_ends_soon_after_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank came to both meshes, and was lost then."""
    store, changed = memory_store(), threading.Condition()
    join, gone = GlooPlace.join, threading.Event()

    def join_unless_second(place: GlooPlace) -> Any:
        if place.rank == 1:
            gone.set()
            raise NodeLost("killed")
        return join(place)

    monkeypatch.setattr(GlooPlace, "join", join_unless_second)
    here, _ = (Rendezvous(generation(1, 0, 1), rank, lambda: store, "127.0.0.1", changed) for rank in range(2))
    assert gone.wait(10)
    time.sleep(0.1)
    with changed:
        assert not here.has_ended
        here.leave()
        assert changed.wait_for(lambda: here.has_ended, 10)
    await_the_end_of_rendezvous(10)


class LeftTooLate(Rendezvous):
    """One that is left at the very moment at which all have come."""

    def _meet(self) -> Connections:
        found = super()._meet()
        self.leave()
        return found


def test_connections_to_an_ended_rendezvous_are_closed() -> None:
    store, changed = memory_store(), threading.Condition()
    late, here = (
        kind(generation(1, 0, 1), rank, lambda: store, "127.0.0.1", changed)
        for rank, kind in enumerate((LeftTooLate, Rendezvous))
    )
    with changed:
        assert changed.wait_for(lambda: here.has_ended, 20)
    await_the_end_of_rendezvous(10)
    assert late.connections is None
    assert here.connections is not None
    here.connections.abort(NodeLost("this generation is over"))
    assert here.connections.has_ended()  # and no thread of the other's is left, which every test looks for
