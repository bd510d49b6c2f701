"""Who of an elastic run is needed, may speak, is replaced, and when nobody is left; processes are imitated."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from evener.launch.nodes import NodeSpec
from evener.launch.ranks import _relay
from evener.membership.coordinator import JOIN_SECONDS
from evener.membership.generation import (
    Beat,
    Generation,
    Hello,
    Probe,
    ReachedPeers,
    decode_for_process,
    encode_message,
)
from evener.membership.rank_supervisor import RankSupervisor
from evener.records.errors import NodeLost
from support.refusals import refused

NODES = [NodeSpec(name="a"), NodeSpec(name="b")]


@dataclass
class Imitation:
    """What is seen of a process."""

    number: int
    said: deque[bytes] = field(default_factory=deque)
    told: list[Any] = field(default_factory=list)
    has_ended: bool = False
    has_finished: bool = False
    failure: Any = None
    ending: str = "was killed by signal 9 (SIGKILL)"
    is_unread: bool = False

    @property
    def is_drained(self) -> bool:
        return self.has_ended and not self.is_unread

    @property
    def has_failed(self) -> bool:
        return self.has_ended and not self.has_finished

    def tell(self, data: bytes) -> None:
        self.told.append(decode_for_process(data))

    def generations(self) -> list[list[int]]:
        """The processes of each that it was told of."""
        return [[p.process for p in one.participants] for one in self.told if isinstance(one, Generation)]


class World:
    """Two nodes, founded."""

    def __init__(self) -> None:
        self.ranks: Any = [Imitation(0), Imitation(1)]
        self.started: list[Any] = []
        self.elastic: RankSupervisor[Any] = RankSupervisor(self.ranks, 60.0, self._start)
        for rank in self.ranks:
            rank.said.append(encode_message(Hello(node=NODES[rank.number].name, initial_nodes=("a", "b"))))
        self.elastic.tick()

    def _start(self, _rank: int, number: int) -> Any:
        self.started.append(Imitation(number))
        return self.started[-1]


def test_loss_is_announced_at_once_and_the_process_replaced() -> None:
    world = World()
    first, second = world.ranks
    first.has_ended = True
    world.elastic.tick()
    assert second.generations() == [[0, 1], [1]]
    assert [one.number for one in world.started] == [2]
    assert not world.elastic.ends_the_run(first)
    assert not world.elastic.may_speak(first)
    assert not world.elastic.may_speak(world.started[0])  # it takes no part yet
    assert world.elastic.is_needed(second)


def test_ended_process_is_replaced_after_its_output_is_read() -> None:
    world = World()
    first, second = world.ranks
    first.has_ended = first.is_unread = True
    world.elastic.tick()
    assert (world.started, second.generations()) == ([], [[0, 1]])
    first.is_unread = False
    world.elastic.tick()
    assert second.generations() == [[0, 1], [1]]
    assert [one.number for one in world.started] == [2]


def test_repeatedly_ending_process_is_not_restarted_at_once() -> None:
    world = World()
    world.ranks[0].has_ended = True
    world.elastic.tick()
    world.started[0].has_ended = True
    world.elastic.tick()
    assert len(world.started) == 1


def test_stopping_run_replaces_no_process() -> None:
    world = World()
    world.elastic.is_stopping = True
    world.ranks[0].has_ended = True
    world.elastic.tick()
    assert world.started == []


def test_run_without_processes_raises_node_lost() -> None:
    world = World()
    for rank in world.ranks:
        rank.has_ended = True
    with refused(NodeLost):
        world.elastic.tick()


def test_end_of_all_processes_between_two_polls_raises_node_lost() -> None:
    """Who looks for those that are needed sees that all have ended before it has asked what that means."""
    world = World()
    for rank in world.ranks:
        rank.has_ended = True
    processes: Any = None  # nobody is left to be heard
    lone: Any = None  # nor to be looked for
    with refused(NodeLost):
        _relay(processes, world.ranks, lambda _: None, 60.0, world.elastic, lambda: True, lone)


def test_no_loss_is_declared_after_a_rank_has_finished() -> None:
    world = World()
    first, second = world.ranks
    first.has_finished = first.has_ended = True
    world.elastic.tick()
    second.has_ended = True
    world.elastic.tick()
    assert second.generations() == [[0, 1]]
    assert not world.elastic.is_needed(second)


def test_heartbeats_are_answered_until_the_process_is_dropped() -> None:
    world = World()
    first, second = world.ranks
    second.said.append(encode_message(Beat(count=5, step=3, holds=1)))
    world.elastic.tick()
    assert second.told[-1].count == 5
    second.has_ended = True
    world.elastic.tick()
    told = len(second.told)
    second.said.append(encode_message(Beat(count=6, step=3, holds=1)))
    world.elastic.tick()
    assert len(second.told) == told
    assert first.generations() == [[0, 1], [0]]


def test_receiver_of_the_state_has_time_to_confirm_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clock = World(), time.monotonic
    world.ranks[0].has_ended = True
    world.elastic.tick()
    third = world.started[0]
    world.ranks[1].said.append(encode_message(Beat(count=1, step=3, holds=2)))
    third.said.append(encode_message(Hello(node="a")))
    world.elastic.tick()
    assert third.told == [Probe(nodes={1: "b"})]
    third.said.append(encode_message(ReachedPeers(processes=(1,))))
    world.elastic.tick()
    assert world.ranks[1].generations()[-1] == [1]
    time.sleep(JOIN_SECONDS)
    world.elastic.tick()
    assert third.generations() == [[1, 2]]
    world.ranks[1].has_ended = True
    world.elastic.tick()  # no process has reported that it has the state
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 10)
    world.elastic.tick()
    third.said.append(encode_message(Beat(count=1, step=3, holds=3)))
    world.elastic.tick()
    assert third.generations()[-1] == [2]


def test_reconnected_process_is_probed_again() -> None:
    world = World()
    world.ranks[0].has_ended = True
    world.elastic.tick()
    third = world.started[0]
    for _ in range(2):
        third.said.append(encode_message(Hello(node="a")))
        world.elastic.tick()
        world.elastic.tick()
    assert third.told == [Probe(nodes={1: "b"})] * 2
    assert not any(isinstance(one, Probe) for one in world.ranks[1].told)


def world_without_first() -> World:
    """Return a world whose first process leaves on notice, and may not have finished its step."""
    world = World()
    world.ranks[0].said.append(encode_message(Beat(count=1, step=3, holds=1)))
    world.elastic.tick()
    world.elastic.release(world.ranks[0])
    world.elastic.tick()
    return world


def test_leaving_process_may_speak_until_the_others_compute_without_it() -> None:
    world = world_without_first()
    first, second = world.ranks
    assert second.generations() == first.generations() == [[0, 1], [1]]
    assert world.elastic.may_speak(first)
    assert world.elastic.is_needed(first)
    second.said.append(encode_message(Beat(count=1, step=4, holds=2)))
    world.elastic.tick()
    assert not world.elastic.may_speak(first)
    assert world.elastic.is_lost(first)


def test_leaving_process_that_completes_the_run_is_awaited() -> None:
    world = world_without_first()
    first, second = world.ranks
    second.has_finished = second.has_ended = True
    world.elastic.tick()
    assert world.elastic.is_needed(first)
    first.has_finished = first.has_ended = True
    world.elastic.tick()
    assert not world.elastic.ends_the_run(first)
    assert not world.started
