"""A run calibrates the profile that it was planned with."""

from __future__ import annotations

import msgspec
import pytest

from evener.oracle.advice import plan_of
from evener.oracle.calibration import fit_profile
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.search import search
from evener.records.errors import InvalidInput
from evener.records.plan import Plan
from evener.records.profile import ClusterProfile
from evener.records.record import NodeStep, Step, TrainRecord
from support.imagined_machines import cluster, model

PROFILE = cluster([1.0, 0.5], alpha=1e-6, beta=1e-10)
JOB = model().job


def planned(profile: ClusterProfile) -> Plan:
    return plan_of(search(CostModel(JOB, profile), ["data"]))


def record(plan: Plan, slower: tuple[float, ...], waiting: float, steps: int) -> TrainRecord:
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
    return TrainRecord(
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
        steps=tuple(Step(step=i + 1, epoch=0, samples=64, loss=1.0, seconds=1.0, nodes=nodes) for i in range(steps)),
    )


def test_a_long_run_counts_almost_fully_and_a_short_one_partly() -> None:
    plan = planned(PROFILE)
    assert plan.strategy == "data"
    long = fit_profile(PROFILE, record(plan, (2.0, 0.5), 3.0, 4000))
    assert [device.learnt for device in long.devices] == pytest.approx([2.0, 0.5], rel=0.01)
    assert long.learnt == pytest.approx(3.0, rel=0.01)
    short = fit_profile(PROFILE, record(plan, (2.0, 0.5), 3.0, 12))
    assert 1.1 < short.devices[0].learnt < 1.5
    assert 0.7 < short.devices[1].learnt < 0.9


def test_calibration_corrects_the_next_prediction() -> None:
    plan = planned(PROFILE)
    taught = fit_profile(PROFILE, record(plan, (2.0, 2.0), 3.0, 10_000))
    again = planned(taught)
    assert plan.prediction is not None
    assert again.prediction is not None
    assert again.prediction.compute_seconds == pytest.approx(2 * plan.prediction.compute_seconds, rel=0.01)
    assert TrainingJob(graph=JOB.graph, batch_size=64).batch_size == again.batch_size
    confirmed = fit_profile(taught, record(again, (1.0, 1.0), 1.0, 10_000))
    assert [device.learnt for device in confirmed.devices] == pytest.approx([d.learnt for d in taught.devices])


def test_a_record_that_does_not_match_the_profile_is_refused() -> None:
    plan = planned(PROFILE)
    fitting = record(plan, (1.0, 1.0), 1.0, 5)
    with pytest.raises(InvalidInput):
        fit_profile(PROFILE, msgspec.structs.replace(fitting, steps=()))
    with pytest.raises(InvalidInput):
        fit_profile(PROFILE, msgspec.structs.replace(fitting, plan=msgspec.structs.replace(plan, prediction=None)))
    other = ClusterProfile(devices=tuple(msgspec.structs.replace(d, node="x") for d in PROFILE.devices))
    with pytest.raises(InvalidInput):
        fit_profile(other, fitting)
