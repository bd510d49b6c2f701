"""Calibrates a profile with past runs: what they took, against what the formulas say of them with this profile.

    computing of a device    median over steps of  measured / predicted seconds
    exchanges                median over steps of  the shortest wait of a rank / predicted seconds of exchanges

The logarithms of these factors are averaged over the runs, weighted by their steps, with twenty steps more of factor 1:

    log f = sum over runs of steps log(factor) / (20 + sum over runs of steps)

A single long run counts almost fully, a short one partly. The last rank to arrive waits for the exchange only, the
others also wait for that rank; therefore the shortest wait is used. How much this helps is said by runs that were left
out: each run is predicted from a profile that all others have corrected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.search import estimates_on
from evener.records.errors import DoesNotFit, InvalidInput, InvalidValue
from evener.records.graph import ModelGraph
from evener.records.profile import PRECISIONS, ClusterProfile
from evener.records.record import Step, TrainRecord

_WARM_UP_STEPS = 2
_PRIOR_STEPS = 20
_MAX_FACTOR = 100.0
_MIN_PREDICTED_SECONDS = 1e-6


class PastRun(NamedTuple):
    """A run to learn from.

    Attributes:
        graph: the model that it trained.
        record: what it took.
        optimizer: `sgd`, `momentum` or `adam`.
    """

    graph: ModelGraph
    record: TrainRecord
    optimizer: str = "momentum"


class Calibration(NamedTuple):
    """What was learned from runs.

    Attributes:
        profile: profile with corrected computing and exchange times.
        errors: error of the predicted step of every run, relative to the measured one, before.
        held_out: the same, each from a profile that all other runs have corrected; empty for a single run.
    """

    profile: ClusterProfile
    errors: tuple[float, ...]
    held_out: tuple[float, ...]

    @property
    def summary(self) -> str:
        """A sentence about the errors."""
        before = f"learned from {len(self.errors)} runs: predicted steps were {fmean(map(abs, self.errors)):.0%} off"
        if not self.held_out:
            return "learned from one run, " + before.partition(": ")[2] + "; several would show how much this helps"
        return f"{before}, and are {fmean(map(abs, self.held_out)):.0%} off in runs that were left out"


def calibrate(profile: ClusterProfile, runs: Sequence[PastRun]) -> Calibration:
    """Return what is learned from `runs`.

    Raises:
        InvalidInput: nothing can be learned from a run; see `why_unfit`.
    """
    for run in runs:
        if reason := why_unfit(profile, run):
            raise InvalidInput(f"cannot learn from this record: {reason}")
    others = [[*runs[:i], *runs[i + 1 :]] for i in range(len(runs))] if len(runs) > 1 else []
    return Calibration(
        profile=fit_profile(profile, runs),
        errors=tuple(_error(profile, run) for run in runs),
        held_out=tuple(_error(fit_profile(profile, rest), run) for rest, run in zip(others, runs, strict=False)),
    )


def why_unfit(profile: ClusterProfile, run: PastRun) -> str:
    """Return why nothing can be learned from a run; empty if it can."""
    record, known = run.record, {(device.node, device.device) for device in profile.devices}
    reasons = {
        f"its run ended early ({record.ending})": record.ending,
        f"nodes of a master trained by the agreement {record.agreement}": record.agreement,
        "it has no steps": not record.steps,
        f"its precision is {record.precision}": record.precision not in PRECISIONS,
        "its devices are not in the profile": any((a.node, a.device) not in known for a in record.plan.assignments),
    }
    if reason := next((reason for reason, is_so in reasons.items() if is_so), ""):
        return reason
    try:
        _predicted(profile, run)
    except (DoesNotFit, InvalidValue) as error:
        return str(error)
    return ""


def fit_profile(profile: ClusterProfile, runs: Iterable[PastRun]) -> ClusterProfile:
    """Return `profile` with computing and exchange times corrected by the measurements of `runs`."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, float(_PRIOR_STEPS)])
    for run in runs:
        num_steps = len(run.record.steps)
        for name, factor in _factors(profile, run).items():
            sums[name][0] += num_steps * log(factor)
            sums[name][1] += num_steps
    factors = {name: exp(total / weight) for name, (total, weight) in sums.items()}
    return msgspec.structs.replace(
        profile,
        devices=tuple(
            msgspec.structs.replace(device, learnt=device.learnt * factors.get((device.node, device.device), 1.0))
            for device in profile.devices
        ),
        learnt=profile.learnt * factors.get(_EXCHANGES, 1.0),
    )


_EXCHANGES = ("", "")
"""Name of the factor of exchanges, among the nodes and devices of the others."""


def _factors(profile: ClusterProfile, run: PastRun) -> dict[tuple[str, str], float]:
    """Return measured by predicted seconds, of computing by node and device, and of exchanges."""
    model, estimate, devices = _predicted(profile, run)
    record, steps = run.record, _steps(run.record)
    every, accumulate = record.every, record.plan.accumulate
    factors = {}
    for assignment, device in zip(record.plan.assignments, devices, strict=True):
        ratios = []
        for step in steps:
            node = step.nodes[assignment.rank]
            if record.plan.strategy in ("serial", "data"):
                update = model.update_seconds(device, model.parameter_bytes)
                part = model.workers[device].seconds(node.samples / every / accumulate)
                predicted = every * (accumulate * part - (accumulate - 1) * update)
            else:  # the layers are divided: the rank that computes longest is compared, for all of them
                node = max(step.nodes, key=lambda one: one.compute_seconds)
                predicted = every * estimate.compute_seconds
            if node.samples and predicted > _MIN_PREDICTED_SECONDS:
                ratios.append((node.compute_seconds + node.update_seconds) / predicted)
        factors[assignment.node, assignment.device] = _bounded_median(ratios)
    exchanging = every * estimate.communication_seconds
    if exchanging > _MIN_PREDICTED_SECONDS:
        waits = [min(node.wait_seconds for node in step.nodes) / exchanging for step in steps]
        factors[_EXCHANGES] = _bounded_median(waits)
    return factors


def _predicted(profile: ClusterProfile, run: PastRun) -> tuple[CostModel, CostEstimate, list[int]]:
    """Return what the formulas say of a run, and the devices of its ranks."""
    record, plan = run.record, run.record.plan
    job = TrainingJob(
        graph=run.graph,
        batch_size=plan.batch_size,
        optimizer=run.optimizer,
        precision=record.precision,  # type: ignore[arg-type]
    )
    model = CostModel(job, profile)
    places = {(device.node, device.device): index for index, device in enumerate(profile.devices)}
    devices = [places[a.node, a.device] for a in plan.assignments]
    estimates, reason = estimates_on(model, plan.strategy, devices)
    if not estimates:
        raise DoesNotFit(f"the oracle has no price for {plan.strategy} on {len(devices)} devices: {reason}")
    same = [one for one in estimates if one.accumulate == plan.accumulate] or estimates
    return model, min(same, key=lambda one: one.step_seconds), devices


def _error(profile: ClusterProfile, run: PastRun) -> float:
    """Return the error of the predicted step of a run, relative to the measured one."""
    measured = median(step.seconds for step in _steps(run.record)) / run.record.every
    return _predicted(profile, run)[1].step_seconds / measured - 1


def _steps(record: TrainRecord) -> list[Step]:
    return [step for step in record.steps if step.step > _WARM_UP_STEPS] or list(record.steps)


def _bounded_median(ratios: list[float]) -> float:
    """Return the median within bounds; 1 without ratios."""
    return min(_MAX_FACTOR, max(1 / _MAX_FACTOR, median(ratios))) if ratios else 1.0
