"""Plans of data parallelism leave out nodes that slow the step, and respect memory."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from evener.oracle.apportion import NodeCost
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.data_parallel import (
    Candidate,
    GradientSync,
    faster_members,
    fitted_to_step_profile,
    plan_data_parallel,
    reapportioned,
    without_slow_nodes,
)
from evener.oracle.division.layout import ring_bytes
from evener.records.errors import DoesNotFit
from evener.records.plan import Plan
from support.refusals import refused

FREE = GradientSync(gradient_bytes=0)


def node(i: int, unit: float, fixed: float = 0.0, max_units: int | None = None) -> Candidate:
    return Candidate(
        node=f"n{i}", device="cpu", worker=NodeCost(unit_seconds=unit, fixed_seconds=fixed, max_units=max_units)
    )


def test_three_uneven_nodes_share_in_proportion_to_speed() -> None:
    plan = plan_data_parallel([node(0, 1.0), node(1, 2.0), node(2, 4.0)], 224, FREE)
    assert [a.samples for a in plan.assignments] == [128, 64, 32]
    assert plan.prediction is not None
    assert plan.prediction.alone_seconds == 224
    assert plan.prediction.step_seconds == 128


def test_node_that_costs_more_than_it_gains_is_left_out_with_its_reason() -> None:
    slow_link = GradientSync(gradient_bytes=100, alpha=30.0, beta=0.0)
    plan = plan_data_parallel([node(0, 1.0), node(1, 4.0)], 64, slow_link)
    assert [a.node for a in plan.assignments] == ["n0"]
    assert plan.strategy == "serial"
    assert plan.rejected[0].what == "n1"
    assert plan.rejected[0].step_seconds is not None
    assert plan.rejected[0].step_seconds > 64


def test_a_node_too_slow_for_one_sample_is_left_out() -> None:
    plan = plan_data_parallel([node(0, 0.001), node(1, 1000.0)], 64, FREE)
    assert [a.node for a in plan.assignments] == ["n0"]
    assert plan.rejected[0].what == "n1"


def test_the_first_rank_can_be_left_out() -> None:
    plan = plan_data_parallel([node(0, 1000.0), node(1, 0.001), node(2, 0.001)], 64, FREE)
    assert [(a.rank, a.node, a.samples) for a in plan.assignments] == [(0, "n1", 32), (1, "n2", 32)]


def test_memory_bounds_a_share_and_the_reason_says_so() -> None:
    plan = plan_data_parallel([node(0, 1.0, max_units=10), node(1, 1.0)], 64, FREE)
    assert [a.samples for a in plan.assignments] == [10, 54]
    assert "memory holds no more than 10" in plan.assignments[0].reason


def test_a_slow_node_is_needed_where_the_fast_one_cannot_hold_the_batch() -> None:
    plan = plan_data_parallel([node(0, 0.001, max_units=10), node(1, 1000.0)], 11, FREE)
    assert [a.samples for a in plan.assignments] == [10, 1]
    assert plan.prediction is not None
    assert plan.prediction.alone_seconds == 11000


def test_a_batch_that_does_not_fit_names_the_accumulation_that_does() -> None:
    with refused(DoesNotFit):
        plan_data_parallel([node(0, 1.0, max_units=10), node(1, 1.0, max_units=5)], 64, FREE)
    plan = plan_data_parallel([node(0, 1.0, max_units=10), node(1, 1.0, max_units=5)], 64, FREE, accumulate=5)
    assert sum(a.samples for a in plan.assignments) == 13


def test_user_shares_are_used_unchanged() -> None:
    plan = plan_data_parallel([node(0, 1.0), node(1, 9.0), node(2, 5.0)], 10, FREE, shares=[7, 2, 1])
    assert [a.samples for a in plan.assignments] == [7, 2, 1]
    assert plan.assignments[1].reason == "share as requested; speed 0.11 of the fastest"


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(8, 200),
    st.floats(0, 5),
    st.floats(0, 1e-3),
)
def test_a_plan_is_never_predicted_slower_than_the_best_device_alone(
    units: list[float], batch: int, alpha: float, beta: float
) -> None:
    exchange = GradientSync(gradient_bytes=10_000, statistics=3, message_seconds=alpha, alpha=alpha, beta=beta)
    prediction = plan_data_parallel([node(i, u) for i, u in enumerate(units)], batch, exchange).prediction
    assert prediction is not None
    assert prediction.alone_seconds is not None
    assert prediction.step_seconds <= prediction.alone_seconds * (1 + 1e-9)


def test_ring_all_reduce_costs() -> None:
    assert all_reduce_seconds(1000, 1, 1.0, 1.0) == 0
    assert all_reduce_seconds(1000, 4, 0.5, 0.001) == pytest.approx(6 * (0.5 + 0.25))
    assert ring_bytes(1000, 4) == 1500


def profiled(plan: Plan, computing: Sequence[float], waiting: float = 0.0) -> Plan:
    """Return `plan` after a profiled step with these seconds of computing and `waiting` seconds of other time."""
    assert plan.prediction is not None
    seconds = {"step_seconds": max(computing) + waiting, "compute_seconds": max(computing)}
    return fitted_to_step_profile(replace(plan, prediction=replace(plan.prediction, **seconds)), computing)


def test_two_equal_nodes_are_not_predicted_four_times_as_fast() -> None:
    plan = plan_data_parallel([node(0, 1.0), node(1, 1.0)], 64, FREE)
    after = profiled(plan, [15.5, 15.5])  # the machine has become idle: half of the seconds that were measured
    assert after.prediction is not None
    assert after.prediction.alone_seconds == pytest.approx(31.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 50), st.floats(0.1, 10)), min_size=2, max_size=5),
    st.integers(16, 200),
    st.integers(1, 3),
    st.floats(0, 50),
)
def test_prediction_never_exceeds_the_sum_of_node_speeds(
    nodes: list[tuple[float, float, float]], batch: int, accumulate: int, waiting: float
) -> None:
    candidates = [node(i, unit, fixed) for i, (unit, fixed, _) in enumerate(nodes)]
    plan = plan_data_parallel(candidates, batch, FREE, accumulate=accumulate)
    computing = [
        factor * accumulate * (assignment.fixed_seconds + assignment.samples * assignment.sample_seconds)
        for assignment, (_, _, factor) in zip(plan.assignments, nodes, strict=False)
    ]
    measured = profiled(plan, computing, waiting)
    for after in (measured, reapportioned(measured)):
        assert after.prediction is not None
        assert after.prediction.alone_seconds is not None
        alone = [
            assignment.fixed_seconds + plan.micro_batch_size * assignment.sample_seconds
            for assignment in after.assignments
        ]
        speeds = sum(min(alone) / each for each in alone)
        assert after.prediction.alone_seconds <= speeds * after.prediction.step_seconds * (1 + 1e-9)
    fewer = without_slow_nodes(reapportioned(measured))
    remaining = fewer or reapportioned(measured)
    assert remaining.prediction is not None
    assert remaining.prediction.alone_seconds is not None
    assert 0.9 * remaining.prediction.step_seconds <= remaining.prediction.alone_seconds * (1 + 1e-9)


def test_nodes_that_lengthen_the_profiled_step_are_left_out_with_both_predictions() -> None:
    plan = plan_data_parallel([node(0, 1.0), node(1, 1.0), node(2, 4.0)], 72, FREE)
    measured = reapportioned(profiled(plan, [32.0, 32.0, 1600.0], waiting=30.0))
    fewer = without_slow_nodes(measured)
    assert fewer is not None
    assert fewer.prediction is not None
    assert measured.prediction is not None
    assert [(assignment.node, assignment.samples) for assignment in fewer.assignments] == [("n0", 36), ("n1", 36)]
    assert fewer.prediction.step_seconds == pytest.approx(36 + 30)
    rejected = {assignment.what: assignment.step_seconds for assignment in fewer.rejected}
    assert rejected["n2"] == pytest.approx(measured.prediction.step_seconds)


def test_one_node_remains_where_exchanges_take_longer_than_computing() -> None:
    plan = plan_data_parallel([node(0, 1.0), node(1, 1.0)], 64, FREE)
    measured = profiled(plan, [32.0, 32.0], waiting=567.0)
    fewer = without_slow_nodes(measured)
    assert fewer is not None
    assert fewer.prediction is not None
    assert (fewer.strategy, [assignment.samples for assignment in fewer.assignments]) == ("serial", [64])
    assert (fewer.prediction.step_seconds, fewer.prediction.communication_seconds) == (64.0, 0.0)
    assert fewer.prediction.sent_bytes == 0


def test_helpful_nodes_and_nodes_needed_for_memory_stay() -> None:
    assert (
        without_slow_nodes(profiled(plan_data_parallel([node(0, 1.0), node(1, 1.0)], 64, FREE), [32, 32], 10)) is None
    )
    workers = [node(i, unit, max_units=40).worker for i, unit in enumerate((1.0, 1.0))]
    assert faster_members(workers, [32, 32], 1, 600.0) is None
