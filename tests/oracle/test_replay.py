"""Replays of steps: which ranks wait, and which exchanges are hidden."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.replay import ExchangeKind, TraceEvent, replay
from evener.records.errors import InvalidValue

Ranks = tuple[int, ...]


def begins(computing: float, number: int = 0, ranks: Ranks = (0, 1), kind: ExchangeKind = "exchange") -> TraceEvent:
    return TraceEvent(computing=computing, act="begin", exchange=number, ranks=ranks, kind=kind, nbytes=8)


def needs(computing: float = 0.0, number: int = 0) -> TraceEvent:
    return TraceEvent(computing=computing, act="need", exchange=number)


def ends(computing: float) -> TraceEvent:
    return TraceEvent(computing=computing)


def one_second(_kind: ExchangeKind, _ranks: Ranks, _nbytes: int, _meanwhile: float) -> float:
    return 1.0


def test_early_rank_waits_for_the_late_one_and_both_for_the_exchange() -> None:
    early, late = replay([[begins(2), needs(), ends(3)], [begins(5), needs(), ends(1)]], one_second)
    assert (early.computing, early.waiting, early.exchanging, early.seconds) == (5, 3, 1, 9)
    assert (late.computing, late.waiting, late.exchanging, late.seconds) == (6, 0, 1, 7)


def test_exchange_cost_receives_the_computing_that_overlaps_it() -> None:
    computed: list[float] = []

    def hidden(_kind: ExchangeKind, _ranks: Ranks, _nbytes: int, meanwhile: float) -> float:
        computed.append(meanwhile)
        return max(0.25, 2 - meanwhile)

    first, second = replay([[begins(1), needs(4)], [begins(3), needs(0.5)]], hidden)
    assert sorted(computed) == [0.5, 2]  # since the exchange began, which both had joined at 3
    assert (first.seconds, second.seconds) == (5.25, 5)


def test_exchanges_are_matched_by_their_ranks_in_order() -> None:
    parts = [
        [begins(1), begins(0, 1, (0, 2)), needs(0, 1), needs(0, 0)],
        [begins(9), needs()],
        [begins(4, 0, (0, 2)), needs()],
    ]
    first, second, third = replay(parts, lambda *_: 0.0)
    assert (third.seconds, first.seconds, second.seconds) == (4, 9, 9)


def test_exchange_counts_as_neighbours_if_any_rank_skips_a_peer() -> None:
    kinds: list[ExchangeKind] = []

    def heard(kind: ExchangeKind, _ranks: Ranks, _nbytes: int, _meanwhile: float) -> float:
        kinds.append(kind)
        return 0.0

    ranks = (0, 1, 2)
    replay(
        [
            [begins(0, 0, ranks, "neighbours"), needs()],
            [begins(0, 0, ranks, "exchange"), needs()],
            [begins(0, 0, ranks, "neighbours"), needs()],
        ],
        heard,
    )
    assert set(kinds) == {"neighbours"}


def test_rank_that_would_wait_forever_is_reported() -> None:
    with pytest.raises(InvalidValue) as caught:
        replay([[begins(1), needs()], [ends(1)]], one_second)
    assert caught.value.value == [0]


seconds = st.floats(min_value=0, max_value=10)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=6), seconds)
def test_step_time_lies_between_any_rank_alone_and_all_in_turn(
    rounds: list[tuple[float, float, float]], cost: float
) -> None:
    ranks = (0, 1, 2)
    parts = [
        [beat for i, row in enumerate(rounds) for beat in (begins(row[rank], i, ranks), needs(0.0, i))]
        for rank in ranks
    ]
    played = replay(parts, lambda *_: cost)
    longest = sum(max(row) for row in rounds) + cost * len(rounds)  # all meet at every exchange
    for rank, rank_step in enumerate(played):
        assert rank_step.computing == pytest.approx(sum(row[rank] for row in rounds))
        assert rank_step.seconds == pytest.approx(longest)
