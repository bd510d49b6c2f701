"""Runs calibrate the profile of their machines, and runs that were left out say how much that helps."""

from __future__ import annotations

import msgspec
import pytest

from evener.oracle.advice import plan_of
from evener.oracle.calibration import PastRun, calibrate, fit_profile, why_unfit
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.search import search
from evener.records.errors import InvalidInput
from evener.records.plan import Plan, Strategy
from evener.records.profile import ClusterProfile
from evener.records.record import NodeStep, Step, TrainRecord
from support.imagined_machines import cluster, model

PROFILE = cluster([1.0, 0.5], alpha=1e-6, beta=1e-10)
JOB = model().job


def planned(profile: ClusterProfile, strategy: Strategy = "data") -> Plan:
    ranking = search(CostModel(JOB, profile), [strategy])
    return plan_of(ranking, next(one for one in ranking.ranked if one.strategy == strategy))


def run(plan: Plan, slower: tuple[float, ...], waiting: float, steps: int) -> PastRun:
    """A run in which rank i computed `slower[i]` times as long as predicted, and exchanges took `waiting` times."""
    assert plan.prediction is not None
    nodes = tuple(
        NodeStep(
            samples=a.samples,
            io_seconds=0.0,
            compute_seconds=slower[a.rank] * (a.fixed_seconds + a.samples * a.sample_seconds),
            wait_seconds=waiting * plan.prediction.communication_seconds * (1 + a.rank),
            update_seconds=0.0,
            sent_bytes=0,
        )
        for a in plan.assignments
    )
    seconds = max(node.compute_seconds for node in nodes) + min(node.wait_seconds for node in nodes)
    record = TrainRecord(
        task="task",
        plan=plan,
        seed=0,
        epochs=1,
        precision="fp32",
        seconds=1.0,
        samples_per_second=1.0,
        final_loss=None,
        validation_accuracy=None,
        startup_seconds=0.0,
        steps=tuple(
            Step(step=i + 1, epoch=0, samples=64, loss=1.0, seconds=seconds, nodes=nodes) for i in range(steps)
        ),
    )
    return PastRun(JOB.graph, record, JOB.optimizer)


def test_a_long_run_counts_almost_fully_and_a_short_one_partly() -> None:
    plan = planned(PROFILE)
    assert plan.strategy == "data"
    long = fit_profile(PROFILE, [run(plan, (2.0, 0.5), 3.0, 4000)])
    assert [device.learnt for device in long.devices] == pytest.approx([2.0, 0.5], rel=0.01)
    assert long.learnt == pytest.approx(3.0, rel=0.01)
    short = fit_profile(PROFILE, [run(plan, (2.0, 0.5), 3.0, 12)])
    assert 1.1 < short.devices[0].learnt < 1.5
    assert 0.7 < short.devices[1].learnt < 0.9


def test_calibration_corrects_the_next_prediction() -> None:
    plan = planned(PROFILE)
    taught = fit_profile(PROFILE, [run(plan, (2.0, 2.0), 3.0, 10_000)])
    again = planned(taught)
    assert plan.prediction is not None
    assert again.prediction is not None
    assert again.prediction.compute_seconds == pytest.approx(2 * plan.prediction.compute_seconds, rel=0.01)
    assert TrainingJob(graph=JOB.graph, batch_size=64).batch_size == again.batch_size
    confirmed = fit_profile(taught, [run(again, (1.0, 1.0), 1.0, 10_000)])
    assert [device.learnt for device in confirmed.devices] == pytest.approx([d.learnt for d in taught.devices])


def test_run_that_was_predicted_well_when_it_began_still_corrects_the_formulas() -> None:
    """As runs are that rehearse their steps: their own prediction says nothing about the profile."""
    plan = planned(PROFILE)
    rehearsed = msgspec.structs.replace(plan, prediction=None)
    slow = run(plan, (2.0, 2.0), 1.0, 4000)
    past = slow._replace(record=msgspec.structs.replace(slow.record, plan=rehearsed))
    assert [one.learnt for one in fit_profile(PROFILE, [past]).devices] == pytest.approx([2.0, 2.0], rel=0.01)


def test_run_with_divided_layers_corrects_all_its_devices() -> None:
    plan = planned(PROFILE, "filter")
    assert plan.prediction is not None
    past = run(plan, (1.0, 1.0), 1.0, 4000)
    step = past.record.steps[-1]
    nodes = tuple(
        msgspec.structs.replace(node, compute_seconds=3 * plan.prediction.compute_seconds) for node in step.nodes
    )
    steps = tuple(msgspec.structs.replace(one, nodes=nodes) for one in past.record.steps)
    slower = past._replace(record=msgspec.structs.replace(past.record, steps=steps))
    assert [one.learnt for one in fit_profile(PROFILE, [slower]).devices] == pytest.approx([3.0, 3.0], rel=0.01)


def test_several_runs_are_averaged_by_their_steps() -> None:
    plan = planned(PROFILE)
    runs = [run(plan, (2.0, 2.0), 1.0, 3000), run(plan, (8.0, 8.0), 1.0, 1000)]
    assert fit_profile(PROFILE, runs).devices[0].learnt == pytest.approx(2 ** (6 / 4), rel=0.02)


def test_runs_that_were_left_out_say_how_much_was_learned() -> None:
    plan = planned(PROFILE)
    runs = [run(plan, (factor, factor), factor, 2000) for factor in (2.0, 2.1, 1.9)]
    calibration = calibrate(PROFILE, runs)
    assert calibration.errors == pytest.approx([1 / 2 - 1, 1 / 2.1 - 1, 1 / 1.9 - 1], abs=0.02)
    assert calibration.held_out == pytest.approx([0.0, 1.95 / 2.1 - 1, 2.05 / 1.9 - 1], abs=0.02)
    assert "50% off" in calibration.summary
    alone = calibrate(PROFILE, runs[:1])
    assert alone.held_out == ()
    assert "one run" in alone.summary


def test_a_run_that_does_not_match_the_profile_is_refused() -> None:
    plan = planned(PROFILE)
    fitting = run(plan, (1.0, 1.0), 1.0, 5)
    assert why_unfit(PROFILE, fitting) == ""
    changes: list[dict[str, object]] = [
        {"steps": ()}, {"ending": "stopped"}, {"agreement": "diloco"}, {"precision": "int4"},
    ]  # fmt: skip
    for change in changes:
        unfit = fitting._replace(record=msgspec.structs.replace(fitting.record, **change))
        with pytest.raises(InvalidInput):
            calibrate(PROFILE, [unfit])
    other = ClusterProfile(devices=tuple(msgspec.structs.replace(d, node="x") for d in PROFILE.devices))
    with pytest.raises(InvalidInput):
        calibrate(other, [fitting])
