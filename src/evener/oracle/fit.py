"""Constants from measurements: the line through a few timings, and a profile that a past run has corrected.

    computing of a device    median over steps of  measured / predicted seconds of its samples
    exchanges                median over steps of  the least that a rank waited / predicted seconds of exchanges

A factor f moves the constant by f^w, w = steps / (steps + 20): a long run counts for almost all, a short one for a
part, and what a run confirms stays. The last rank to arrive waits for the exchange alone, the others for it, too:
therefore the least wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from evener.errors import InvalidInput
from evener.plan import Assignment
from evener.profile import ClusterProfile, DeviceProfile
from evener.record import Step, TrainRecord

_WARM_UP_STEPS = 2
_PRIOR_STEPS = 20
_MOST = 100.0
_LEAST_SECONDS = 1e-6


def fit_profile(profile: ClusterProfile, record: TrainRecord) -> ClusterProfile:
    """`profile` with its computing and exchanging corrected by what `record` measured.

    Raises:
        InvalidInput: the record has no steps, its plan no prediction, or its devices are not those of the profile.
    """
    plan = record.plan
    steps = [step for step in record.steps if step.step > _WARM_UP_STEPS] or list(record.steps)
    if not steps or plan.prediction is None:
        raise InvalidInput("a record to learn from needs steps, and a plan with a prediction")
    names = {(device.node, device.device) for device in profile.devices}
    if not any((a.node, a.device) in names for a in plan.assignments):
        raise InvalidInput(
            "the record's devices are not those of the profile; take the profile that the run was planned with"
        )
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
    """Measured by predicted seconds of a rank's computing."""
    plan, ratios = record.plan, []
    for step in steps:
        node = step.nodes[assignment.rank]
        predicted = plan.accumulate * assignment.fixed_seconds * record.every + node.samples * assignment.sample_seconds
        if plan.strategy not in ("serial", "data"):
            assert plan.prediction is not None
            predicted = plan.prediction.compute_seconds * record.every
        if node.samples and predicted > _LEAST_SECONDS:
            ratios.append((node.compute_seconds + node.update_seconds) / predicted)
    return _sane(ratios)


def _exchanging(record: TrainRecord, steps: list[Step]) -> float:
    """Measured by predicted seconds of waiting for exchanges."""
    assert record.plan.prediction is not None
    predicted = record.plan.prediction.communication_seconds * record.every
    if predicted < _LEAST_SECONDS:
        return 1.0
    return _sane([min(node.wait_seconds for node in step.nodes) / predicted for step in steps])


def _sane(ratios: list[float]) -> float:
    """The median, within bounds; 1 of nothing."""
    return min(_MOST, max(1 / _MOST, median(ratios))) if ratios else 1.0


_CLOCK_RESOLUTION = 1e-9


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (fixed, each) of seconds = fixed + n * each through (n, seconds), neither negative.

    Least squares of the relative error, (predicted / measured - 1)^2, so that small n count like large ones. One point
    alone gives a line through zero. If the free line has a negative number, the best allowed one has a zero there.
    """
    known = [(float(n), max(t, _CLOCK_RESOLUTION)) for n, t in points]
    weights = [1 / t**2 for _, t in known]
    total = sum(weights)
    n_mean = sum(w * n for w, (n, _) in zip(weights, known, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, known, strict=True)) / total
    spread = sum(w * (n - n_mean) ** 2 for w, (n, _) in zip(weights, known, strict=True))
    if spread == 0:
        return 0.0, t_mean / n_mean
    slope = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t) in zip(weights, known, strict=True)) / spread
    if slope < 0:
        return t_mean, 0.0
    start = t_mean - slope * n_mean
    if start < 0:
        return 0.0, sum(n / t for n, t in known) / sum((n / t) ** 2 for n, t in known)
    return start, slope
