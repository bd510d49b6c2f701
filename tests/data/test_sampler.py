"""Every sample exactly once an epoch, whoever takes it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.data.sampler import Division, OrderedSampler, ShuffledSampler, StationarySampler, stream
from evener.oracle.apportion import NodeCost, weights_to_workers


def team(*weights: float) -> list[NodeCost]:
    return weights_to_workers(weights, [None] * len(weights))


def samplers(count: int, batch: int, weights: list[float], accumulate: int = 1, seed: int = 3) -> list[ShuffledSampler]:
    return [
        ShuffledSampler(
            count=count, batch_size=batch, accumulate=accumulate, seed=seed, rank=r, division=Division(team(*weights))
        )
        for r in range(len(weights))
    ]


def taken(ranks: list[ShuffledSampler] | list[StationarySampler], step: int) -> list[list[int]]:
    """Samples of a step, a list a micro-batch, over all ranks in order."""
    parts = [rank.step(step) for rank in ranks]
    return [[i for part in micro for i in part.indices.tolist()] for micro in zip(*parts, strict=True)]


@given(
    st.integers(1, 200),
    st.integers(1, 64),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum),
    st.integers(1, 4),
)
def test_every_sample_is_drawn_exactly_once_per_epoch(
    count: int, batch: int, weights: list[int], accumulate: int
) -> None:
    ranks = samplers(count, batch, [float(w) for w in weights], min(accumulate, batch))
    steps = ranks[0].steps_per_epoch
    for epoch in (0, 1):
        seen = [i for s in range(1, steps + 1) for micro in taken(ranks, epoch * steps + s) for i in micro]
        assert sorted(seen) == list(range(count))


def test_step_uses_the_same_samples_for_any_division() -> None:
    alone, three = samplers(50, 16, [1.0], accumulate=3), samplers(50, 16, [7.0, 2.0, 1.0], accumulate=3)
    for step in range(1, 9):
        assert taken(alone, step) == taken(three, step)


def test_epochs_and_seeds_differ_and_the_same_seed_repeats() -> None:
    one, again = samplers(40, 40, [1.0])[0], samplers(40, 40, [1.0])[0]
    other = samplers(40, 40, [1.0], seed=4)[0]
    assert one.step(1)[0].indices.tolist() == again.step(1)[0].indices.tolist()
    assert one.step(1)[0].indices.tolist() != one.step(2)[0].indices.tolist()
    assert one.step(1)[0].indices.tolist() != other.step(1)[0].indices.tolist()


def test_division_change_takes_effect_at_its_step() -> None:
    division = Division(team(1, 1))
    division.change(3, team(3, 1))
    assert [division.sizes(step, 8) for step in (1, 2, 3, 9)] == [(4, 4), (4, 4), (6, 2), (6, 2)]
    division.change(3, team(1, 3))
    assert division.sizes(3, 8) == (2, 6)


def test_loss_weights_cover_the_whole_step() -> None:
    last = samplers(20, 16, [1.0, 1.0], accumulate=2)[0].step(2)
    assert [(part.total, part.is_last) for part in last] == [(4, False), (4, True)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum), st.integers(1, 32), st.integers(1, 3))
def test_stationary_data_are_drawn_once_and_never_leave_their_rank(
    sizes: list[int], batch: int, accumulate: int
) -> None:
    bounds = np.cumsum([0, *sizes])
    parts = [np.arange(a, b) for a, b in pairwise(bounds)]
    ranks = [
        StationarySampler(parts=parts, batch_size=batch, accumulate=accumulate, seed=1, rank=r)
        for r in range(len(parts))
    ]
    for rank, part in zip(ranks, parts, strict=True):
        batches = list(stream(rank, 1, rank.steps_per_epoch))
        assert sorted(i for b in batches for i in b.indices.tolist()) == part.tolist()
    for step in range(1, ranks[0].steps_per_epoch + 1):
        total = sum(len(micro) for micro in taken(ranks, step))
        assert {part.total for rank in ranks for part in rank.step(step)} == {total}


def test_empty_data_are_refused() -> None:
    with pytest.raises(ValueError, match="training samples must be at least one"):
        samplers(0, 4, [1.0])


@given(st.integers(1, 60), st.integers(1, 20), st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum))
def test_validation_follows_the_order_of_the_data(count: int, batch: int, weights: list[int]) -> None:
    division = Division(team(*weights))
    ranks = [
        OrderedSampler(count=count, batch_size=batch, rank=rank, sizes=lambda total: division.sizes(1, total))
        for rank in range(len(weights))
    ]
    steps = range(1, ranks[0].steps_per_epoch + 1)
    assert [i for step in steps for rank in ranks for i in rank.step(step)[0].indices] == list(range(count))
    assert sum(ranks[0].step(step)[0].total for step in steps) == count
