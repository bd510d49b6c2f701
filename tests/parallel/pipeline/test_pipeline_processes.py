"""A stage on every rank, and replicas of different numbers of stages, equal one process."""

from __future__ import annotations

from typing import Any

import pytest

from evener.comm.joining import leave_group
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.schedule import SCHEDULES
from evener.parallel.pipeline.micro_batches import divided
from evener.parallel.pipeline.pipeline import Pipeline
from support.pipeline_cases import CASES, TOLERANCE, Result, assert_equal, cost, descend, joined, piped, serial, start

Options = dict[str, Any]


def compare(env: RankEnvironment, orders: list[tuple[str, int, int, Options]]) -> None:
    """One rank: its part of every case against one process."""
    group = joined(env)
    for name, samples, micro_batches, options in orders:
        expected = serial(CASES[name], samples, micro_batches)
        found, pipeline = piped(CASES[name], samples, on=group, micro_batches=micro_batches, **options)
        what = f"{name} N={samples} M={micro_batches} {options} on rank {env.rank}"
        assert_equal(found, expected, whole=False, what=what)
        assert float((found.loss - (expected.loss if pipeline.is_last else 0)).abs()) < TOLERANCE
    leave_group()


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))]
)
def test_stage_on_every_rank_equals_one_process(ranks: int) -> None:
    orders: list[tuple[str, int, int, Options]] = []
    for name in ("residual", "tied", "branches"):
        for micro_batches in (1, 3, 8):
            for schedule in SCHEDULES:
                policy = ("always", "except_last", "never")[len(orders) % 3]
                orders.append((name, 18, micro_batches, {"schedule": schedule, "rematerialise": policy}))
    start(compare, ranks, orders)


@pytest.mark.slow
def test_every_model_on_three_ranks_equals_one_process() -> None:
    start(compare, 3, [(name, 7, 3, {"rematerialise": "always"}) for name in CASES])


def train_replicas(env: RankEnvironment, order: dict[str, Any]) -> None:
    """Replicas of three and two stages, with 5 and 3 samples of a batch of 8: together they are one process."""
    group = joined(env)
    own = next(i for i, ranks in enumerate(order["replicas"]) if env.rank in ranks)
    for name in order["cases"]:
        case = CASES[name]
        x, y = (divided(values(8), [5, 3])[own] for values in (case.inputs, case.targets))
        options = {"replicas": order["replicas"], "micro_batches": 2, "costs": cost, "weigh": case.weigh}
        pipeline = Pipeline(case.make(), case.inputs(8), case.loss, on=group, **options)
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            total = case.weigh(case.targets(8))
            loss = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None, total=total)
            descend(pipeline.parameters())
        expected = serial(case, 8, [3, 2, 2, 1])
        losses = [float(row) for row in group.all_gather_bytes(repr(float(loss)).encode())]
        assert abs(sum(losses) - float(expected.loss)) < TOLERANCE
        gradients = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
        found = Result(loss, gradients, pipeline.state_dict())
        assert_equal(found, expected, whole=False, what=f"{name} on rank {env.rank}")
    leave_group()


@pytest.mark.parametrize("replicas", [((0, 1, 2), (3, 4)), ((4,), (1, 0, 2, 3))], ids=str)
@pytest.mark.slow
def test_replicas_with_different_stage_counts_equal_one_process(replicas: tuple[tuple[int, ...], ...]) -> None:
    start(train_replicas, 5, {"replicas": replicas, "cases": ["residual", "tied", "branches", "transformer"]})
