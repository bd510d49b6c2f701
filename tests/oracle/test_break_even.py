"""Factors of links, batch and memory change the best plan where the search says so."""

from __future__ import annotations

import pytest

from evener.oracle.break_even import LARGEST_FACTOR, NOTHING_FITS, BreakEven, break_evens
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.search import search
from evener.records.errors import DoesNotFit
from evener.records.profile import ClusterProfile, LinkProfile
from support.imagined_machines import cluster, convolutions, device

GRAPH = convolutions(depth=6, width=32)


def two(beta: float, batch: int = 64, memory: int = 1 << 40, alpha: float = 1e-5) -> CostModel:
    job = TrainingJob(graph=GRAPH, batch_size=batch, optimizer="sgd")
    return CostModel(job, cluster([1, 1], alpha=alpha, beta=beta, memory=memory))


def changes_of(model: CostModel) -> dict[tuple[str, bool], BreakEven]:
    """Changes by the varied quantity, and whether it grows."""
    return {(one.varied, one.factor > 1): one for one in break_evens(model)}


def choice(model: CostModel) -> tuple[str, int]:
    best = search(model).best
    return best.strategy, len(best.devices)


@pytest.mark.parametrize("side", [0.9, 1.1])
def test_faster_links_change_the_plan_where_the_search_says_so(side: float) -> None:
    alpha, beta = 1e-4, 1e-6
    change = changes_of(two(beta, alpha=alpha))["links", True]
    assert 1 < change.factor < LARGEST_FACTOR
    factor = change.factor * side
    found = choice(two(beta / factor, alpha=alpha / factor))
    assert (found == (change.strategy, change.devices)) is (side > 1)
    assert (found == choice(two(beta, alpha=alpha))) is (side < 1)


@pytest.mark.parametrize("side", [0.9, 1.1])
def test_larger_batch_changes_the_plan_where_the_search_says_so(side: float) -> None:
    change = changes_of(two(1e-6, batch=1000))["batch", True]
    assert 1 < change.factor < LARGEST_FACTOR
    found = choice(two(1e-6, batch=round(1000 * change.factor * side)))
    assert (found == (change.strategy, change.devices)) is (side > 1)


def test_measured_links_are_varied_like_levels_of_a_network() -> None:
    job = TrainingJob(graph=GRAPH, batch_size=64, optimizer="sgd")
    links = (LinkProfile(source=0, target=1, alpha=1e-4, beta=1e-6),)
    measured = CostModel(job, ClusterProfile(devices=(device("node-0"), device("node-1")), links=links))
    assert changes_of(measured)["links", True] == changes_of(two(1e-6, alpha=1e-4))["links", True]


def test_direction_that_changes_nothing_says_how_far_it_was_tried() -> None:
    changes = changes_of(two(1.0))
    assert changes["links", False] == BreakEven(
        varied="links", factor=1 / LARGEST_FACTOR, is_change=False, strategy="serial", devices=1
    )
    assert changes["memory", True].factor == LARGEST_FACTOR


def test_memory_that_holds_nothing_any_more_is_found() -> None:
    model = two(1.0)
    memory = int(2 * (model.whole_state_bytes + 64 * model.whole_sample_bytes))
    assert changes_of(two(1.0, memory=memory))["memory", False].factor < 1
    lone = CostModel(TrainingJob(graph=GRAPH, batch_size=1, optimizer="sgd"), cluster([1], memory=memory))
    assert changes_of(lone)["memory", False].strategy == NOTHING_FITS
    with pytest.raises(DoesNotFit):
        break_evens(two(1.0, memory=1000))
