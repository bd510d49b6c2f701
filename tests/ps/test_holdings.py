"""A lease is in hand, then waits for its judgement, then is gone; each only once."""

from __future__ import annotations

from evener.ps.holdings import Holdings
from evener.sync.messages import Lease
from evener.sync.samples import SampleRange


def lease(number: int) -> Lease:
    return Lease(number=number, version=0, samples=SampleRange(epoch=0, ranges=((0, 4),)), num_steps=1)


def test_a_lease_goes_from_hand_to_judgement_and_is_gone() -> None:
    holdings = Holdings()
    holdings.give("a", lease(1))
    holdings.give("a", lease(2))
    holdings.give("a", lease(1))
    assert holdings.first("a") == lease(1)
    assert holdings.answered("a", 1) == lease(1)
    assert holdings.answered("a", 1) is None
    assert holdings.first("a") == lease(2)
    assert holdings.judged("a", 1) == lease(1)
    assert holdings.judged("a", 1) is None


def test_who_is_gone_has_nothing_and_others_keep_theirs() -> None:
    holdings = Holdings()
    for name in ("a", "b"):
        holdings.give(name, lease(1))
        holdings.give(name, lease(2))
        holdings.answered(name, 2)
    holdings.forget("a")
    assert (holdings.first("a"), holdings.judged("a", 2)) == (None, None)
    assert (holdings.first("b"), holdings.judged("b", 2)) == (lease(1), lease(2))
