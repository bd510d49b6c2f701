"""The store that is reached over a rank's line: values come and go, signed, beside generations and beats."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue

import msgspec
import pytest
import torch.distributed as dist

from evener.comm.signed_store import SignedStore
from evener.commands.node_rank import LineStore, RankLine
from evener.membership.generation import Generation, Heard, Participant, encode_message
from evener.membership.rendezvous import Rendezvous
from evener.membership.shared_values import AskValues, SetValue, SharedValues, decode_from_rank
from evener.records.errors import NodeLost
from support.refusals import refused

SECRET = b"s" * 16


class Coordinator:
    """Keeps values for some processes in this one."""

    def __init__(self) -> None:
        self.values = SharedValues()
        self._lock = threading.Lock()
        self._told: dict[int, SimpleQueue[bytes | None]] = {}

    def line(self, process: int) -> RankLine:
        told: SimpleQueue[bytes | None] = SimpleQueue()
        self._told[process] = told

        def hear() -> bytes:
            data = told.get()
            if data is None:
                raise EOFError
            return data

        return RankLine(lambda data: self._answer(process, data), hear)

    def tell(self, process: int, data: bytes | None) -> None:
        self._told[process].put(data)

    def close(self) -> None:
        for told in self._told.values():
            told.put(None)
        for thread in threading.enumerate():
            if thread.name == "evener-line":
                thread.join(10)

    def _answer(self, process: int, data: bytes) -> None:
        message = decode_from_rank(data)
        assert isinstance(message, SetValue | AskValues)
        with self._lock:
            for other, answer in self.values.answers(process, message):
                self._told[other].put(msgspec.msgpack.encode(answer))


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    one = Coordinator()
    yield one
    one.close()


def test_value_set_by_one_rank_is_found_by_the_other(coordinator: Coordinator) -> None:
    first, second = (SignedStore(LineStore(coordinator.line(number)), SECRET) for number in (1, 2))
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(second.get("place")))
    waiting.start()
    assert not second.check(["other"])
    first.set("place", "here")
    waiting.join(10)
    second.wait(["place"], timedelta(seconds=10))
    assert found == [b"here"]


def test_unsigned_value_is_rejected(coordinator: Coordinator) -> None:
    coordinator.values.by_key["place"] = b"x" * 40
    with refused(NodeLost):
        SignedStore(LineStore(coordinator.line(1)), SECRET).get("place")


def test_missing_value_raises_a_store_error_after_the_timeout(coordinator: Coordinator) -> None:
    with pytest.raises(dist.DistStoreError, match=r"did not answer for 0\.05 s"):
        LineStore(coordinator.line(1)).wait(["never"], timedelta(seconds=0.05))


@pytest.mark.parametrize("rank", [0, 1])
def test_abandoned_rendezvous_ends_and_a_complete_one_succeeds(coordinator: Coordinator, rank: int) -> None:
    changed = threading.Condition()
    present = tuple(Participant(process=number, node=f"n{number}", since=1) for number in range(2))

    def meet(number: int, rank: int) -> Rendezvous:
        generation = Generation(number=number, participants=present, reason="", is_urgent=False)
        line = coordinator.line(10 * number + rank)
        return Rendezvous(generation, rank, lambda: SignedStore(LineStore(line), SECRET), "127.0.0.1", changed)

    left = meet(1, rank)
    with changed:
        left.leave()
        assert changed.wait_for(lambda: left.has_ended, 10)
    assert isinstance(left.error, NodeLost)
    both = [meet(2, rank) for rank in range(2)]
    with changed:
        assert changed.wait_for(lambda: all(one.has_ended for one in both), 20)
    for one in both:
        assert one.connections is not None, one.error
        one.connections.abort(NodeLost("the test is over"))
        assert one.connections.has_ended()


def test_other_messages_go_to_the_reader_and_the_end_raises_eof(coordinator: Coordinator) -> None:
    line = coordinator.line(1)
    coordinator.tell(1, encode_message(Heard(count=3)))
    assert line.receive() == encode_message(Heard(count=3))
    coordinator.tell(1, None)
    with pytest.raises(EOFError):
        line.receive()
