"""Pipelines whose stages several devices divide: priced between a pipeline and a division, and cut to fit memory."""

from __future__ import annotations

from functools import partial

import pytest

from evener.oracle.advice import plan_of
from evener.oracle.cost.pipeline import price_pipeline
from evener.oracle.search import price_stage_teams, search
from evener.records.errors import DoesNotFit
from evener.records.plan import Strategy
from support.imagined_machines import convolutions, model

free = partial(model, alpha=0.0, beta=0.0)
DEEP = convolutions(depth=6, width=32)


def test_team_is_as_fast_as_its_devices_together_if_exchanges_are_free() -> None:
    machines = free([1.0] * 4, graph=DEEP)
    alone = price_pipeline(machines, [[0, 1]], 4)
    teams = price_stage_teams(machines, [[0, 1], [2, 3]], "filter", 4)
    assert 0.45 * alone.compute_seconds < teams.compute_seconds < 0.8 * alone.compute_seconds
    assert teams.devices == (0, 1, 2, 3)
    assert teams.members == 2
    assert len(teams.stages) == 2
    assert sum(teams.shares) == pytest.approx(1)


def test_team_members_have_shares_by_their_speeds() -> None:
    shares = price_stage_teams(free([1.0, 0.5, 1.0, 0.5], graph=DEEP), [[0, 1], [2, 3]], "filter", 4).shares
    assert shares[0] == pytest.approx(2 * shares[1])
    assert shares[2] == pytest.approx(2 * shares[3])


def test_slow_links_are_named_as_the_limit() -> None:
    slow = price_stage_teams(model([1.0] * 4, alpha=0.01, beta=1e-8, graph=DEEP), [[0, 1], [2, 3]], "channel", 4)
    assert slow.bottleneck == "exchanges between the devices of a stage"
    assert slow.sent_bytes > price_pipeline(model([1.0] * 4, graph=DEEP), [[0, 1, 2, 3]], 4).sent_bytes


def test_model_too_large_for_a_row_fits_teams_that_divide_weights() -> None:
    heavy = convolutions(depth=2, width=512, rows=2)
    free_of = partial(free, [1.0] * 4, graph=heavy)
    needed = max(price_stage_teams(free_of(), [[0, 1], [2, 3]], "filter", 4).memory_bytes)
    tight = free_of(memory=round(1.1 * needed))
    assert max(price_stage_teams(tight, [[0, 1], [2, 3]], "filter", 4).memory_bytes) <= 1.1 * needed
    with pytest.raises(DoesNotFit):
        price_pipeline(tight, [[0, 1]], 4)


def test_a_plan_gives_the_stage_of_every_device() -> None:
    strategy: Strategy = "pipeline+filter"
    ranking = search(free([1.0] * 4, graph=DEEP), (strategy,))
    estimate = next(estimate for estimate in ranking.ranked if estimate.strategy == "pipeline+filter")
    plan = plan_of(ranking, estimate)
    assert plan.members == 2
    assert [a.stage for a in plan.assignments] == [0, 0, 1, 1]
    assert plan.teams == ((0, 1), (2, 3))
    assert plan.assignments[0].first_layer == plan.assignments[1].first_layer != plan.assignments[2].first_layer
