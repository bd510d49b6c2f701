"""A node's part in a run: leases in order and once, answers that free the way, everything unanswered said again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from linear import BATCH, RATE, LinearEngine, Mood, job, weights
from msgspec.structs import replace

from evener.ps.engine import EngineSetup
from evener.ps.messages import Contribution, ServerReply
from evener.ps.worker_session import WorkerSession
from evener.sync import protocol
from evener.sync.messages import Answer, Lease
from evener.sync.protocol import Sgd, SyncProtocol
from evener.sync.samples import SampleRange

SYNC = protocol.synchronous(batch=BATCH, outer=Sgd(learning_rate=RATE))
OVERLAPPED = replace(protocol.averaging(batch=BATCH, local_steps=1), is_overlapped=True)


class Sent:
    """An inbox that keeps what is to be sent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.images: list[bytes] = []

    def send(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        assert isinstance(header, Contribution)
        assert header.run == "linear-1"
        self.numbers.append(header.push.number)
        self.images.append(bytes(buffers[0]))


def employ(agreement: SyncProtocol = SYNC) -> WorkerSession:
    own = job(agreement)
    setup = EngineSetup(own, None, Path(), "cpu", 1.0, lambda: None)
    return WorkerSession(own, LinearEngine(setup, Mood(seconds=0)))


def told(
    lease: int | None = None, *, answers: int | None = None, brings: bool = False, **words: Any
) -> tuple[ServerReply, memoryview | None]:
    """What the server says, with the number of a lease, or with weights."""
    leased = None if lease is None else Lease(number=lease, version=0, samples=portion(lease))
    contents: Any = "weights" if brings else "nothing"
    answer = Answer(version=0, answers=answers, contents=contents, lease=leased, **words)
    return ServerReply(run="linear-1", answer=answer), weights().memory.data if brings else None


def portion(number: int) -> SampleRange:
    return SampleRange(epoch=0, ranges=((BATCH * (number % 5), BATCH),))


def test_a_lease_is_worked_on_once_though_it_is_told_twice() -> None:
    employment, sent = employ(), Sent()
    assert not employment.can_work
    employment.hear(*told(1, brings=True))
    employment.hear(*told(1))
    assert employment.can_work
    employment.work(sent)
    assert sent.numbers == [1]
    employment.hear(*told(1))
    assert not employment.can_work


def test_without_overlap_the_answer_is_awaited_before_the_next_lease() -> None:
    employment, sent = employ(), Sent()
    employment.hear(*told(1, brings=True))
    employment.work(sent)  # type: ignore[arg-type]
    employment.hear(*told(2))
    assert not employment.can_work
    employment.hear(*told(answers=1, verdict="applied", brings=True))
    assert employment.can_work


def test_with_overlap_two_contributions_are_under_way_and_go_in_the_order_of_their_leases() -> None:
    employment, sent = employ(OVERLAPPED), Sent()
    employment.hear(*told(1, brings=True))
    employment.hear(*told(2))
    employment.hear(*told(3))
    for _ in range(2):
        assert employment.can_work
        employment.work(sent)  # type: ignore[arg-type]
    assert sent.numbers == [1, 2]
    assert not employment.can_work


def test_what_was_not_answered_is_said_again_with_the_same_bytes() -> None:
    employment, sent, again = employ(OVERLAPPED), Sent(), Sent()
    employment.hear(*told(1, brings=True))
    employment.hear(*told(2))
    for _ in range(2):
        employment.work(sent)  # type: ignore[arg-type]
    employment.hear(*told(answers=1, verdict="applied"))
    employment.resend(again)  # type: ignore[arg-type]
    assert again.numbers == [2]
    assert again.images == sent.images[1:]


def test_leases_from_before_a_break_are_void_when_the_server_begins_anew() -> None:
    employment, sent = employ(), Sent()
    employment.hear(*told(1, brings=True))
    employment.hear(*told(7, is_anew=True))
    employment.work(sent)  # type: ignore[arg-type]
    assert sent.numbers == [7]
    employment.hear(*told(answers=7, verdict="applied"))
    assert not employment.can_work


def test_who_is_benched_forgets_its_leases() -> None:
    employment = employ()
    employment.hear(*told(1, brings=True))
    employment.drop_leases()
    assert not employment.can_work


@pytest.mark.parametrize(("first", "size"), [(0, 21), (5, 3)])
def test_a_slice_of_validation_is_assessed_with_the_weights_that_come_along(first: int, size: int) -> None:
    from evener.ps.messages import Validate

    employment = employ()
    asked = Validate(run="linear-1", number=4, first=first, size=size)
    found = employment.validate(asked, weights().memory.data)
    assert (found.run, found.number) == ("linear-1", 4)
    assert found.loss > 0
    assert 0 <= found.correct <= size
