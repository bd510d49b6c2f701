"""Calibrates a profile with past runs: a run corrects its predicted computing and exchange times by factors f,

    computing of a device    median over steps of  measured / predicted seconds of its samples
    exchanges                median over steps of  the shortest wait of a rank / predicted seconds of exchanges

A constant moves by f^w, w = steps / (steps + 20): a long run counts almost fully, a short run partly. The last rank to
arrive waits for the exchange only, the other ranks also wait for it; therefore the shortest wait is used.
"""

from __future__ import annotations

from statistics import median

import msgspec

from evener.records.errors import InvalidInput
from evener.records.plan import Assignment
from evener.records.profile import ClusterProfile, DeviceProfile
from evener.records.record import Step, TrainRecord

_WARM_UP_STEPS = 2
_PRIOR_STEPS = 20
_MAX_FACTOR = 100.0
_MIN_PREDICTED_SECONDS = 1e-6


def fit_profile(profile: ClusterProfile, record: TrainRecord) -> ClusterProfile:
    """Return `profile` with computing and exchange times corrected by the measurements of `record`.

    Raises:
        InvalidInput: the record has no steps, its plan has no prediction, its run ended early, or its devices are not
            in the profile.
    """
    plan = record.plan
    if record.ending:
        raise InvalidInput(
            f"cannot calibrate with a run that ended early ({record.ending}); use a complete run's record"
        )
    steps = [step for step in record.steps if step.step > _WARM_UP_STEPS] or list(record.steps)
    if not steps or plan.prediction is None:
        raise InvalidInput("cannot calibrate with this record: it needs steps, and a plan with a prediction")
    names = {(device.node, device.device) for device in profile.devices}
    if not any((a.node, a.device) in names for a in plan.assignments):
        raise InvalidInput("the record's devices are not in the profile; use the profile that the run was planned with")
    weight = len(steps) / (len(steps) + _PRIOR_STEPS)
    factors = {(a.node, a.device): _computing(record, steps, a) for a in plan.assignments}
    exchanging = _exchanging(record, steps) ** weight
    return msgspec.structs.replace(
        profile,
        devices=tuple(_corrected(device, factors, weight) for device in profile.devices),
        learnt=profile.learnt * exchanging,
    )


def _corrected(device: DeviceProfile, factors: dict[tuple[str, str], float], weight: float) -> DeviceProfile:
    factor = factors.get((device.node, device.device), 1.0) ** weight
    return msgspec.structs.replace(device, learnt=device.learnt * factor)


def _computing(record: TrainRecord, steps: list[Step], assignment: Assignment) -> float:
    """Return the ratio of measured to predicted computing seconds of a rank."""
    plan, ratios = record.plan, []
    for step in steps:
        node = step.nodes[assignment.rank]
        predicted = plan.accumulate * assignment.fixed_seconds * record.every + node.samples * assignment.sample_seconds
        if plan.strategy not in ("serial", "data"):
            assert plan.prediction is not None
            predicted = plan.prediction.compute_seconds * record.every
        if node.samples and predicted > _MIN_PREDICTED_SECONDS:
            ratios.append((node.compute_seconds + node.update_seconds) / predicted)
    return _bounded_median(ratios)


def _exchanging(record: TrainRecord, steps: list[Step]) -> float:
    """Return the ratio of measured to predicted seconds of waiting for exchanges."""
    assert record.plan.prediction is not None
    predicted = record.plan.prediction.communication_seconds * record.every
    if predicted < _MIN_PREDICTED_SECONDS:
        return 1.0
    return _bounded_median([min(node.wait_seconds for node in step.nodes) / predicted for step in steps])


def _bounded_median(ratios: list[float]) -> float:
    """Return the median within bounds; 1 without ratios."""
    return min(_MAX_FACTOR, max(1 / _MAX_FACTOR, median(ratios))) if ratios else 1.0
