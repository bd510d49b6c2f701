"""Plans from measured costs of nodes: data parallelism, and replicas whose ranks hold a model together.

For data parallelism, candidates are tried in order of speed; another candidate joins as long as it shortens the
predicted step. A step takes the slowest rank's computing plus the exchange that no backward pass hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from evener.oracle.all_reduce_shares import bytes_of_uneven_all_reduce, shares_among
from evener.oracle.apportion import NodeCost, apportion, finish_seconds, weights_to_workers
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.records.errors import DoesNotFit, require
from evener.records.plan import Assignment, Plan, Prediction, Rejected, Strategy

_MAX_STEP_RATIO = 0.99
"""Another node must reduce a step to at most this fraction: a predicted gain below 1 % is noise."""
_MAX_STEP_RATIO_WITHOUT = 0.9
"""Leaving out planned nodes must reduce a step to at most this fraction: a smaller gain may be noise of the profile."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A device that could take part.

    Attributes:
        node: name of its machine.
        device: name of the device in PyTorch.
        worker: cost of a micro-batch of n samples, and the number of samples that the memory holds.
    """

    node: str
    device: str
    worker: NodeCost


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """The exchanges of a step, and the cost of the links between ranks.

    Attributes:
        gradient_bytes: size of all weight gradients.
        statistics: number of small exchanges in forward and backward (BatchNorm), which nothing hides.
        statistics_bytes: bytes that a rank sends to each other rank in these.
        message_seconds: seconds of one small exchange.
        alpha: latency of one ring step, seconds.
        beta: seconds per byte.
        bucket_bytes: size of the last gradient bucket, which no backward pass hides.
    """

    gradient_bytes: int
    statistics: int = 0
    statistics_bytes: int = 0
    message_seconds: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    bucket_bytes: int = 25 * 2**20

    def sent_bytes(self, size: int, shares: Sequence[float] = ()) -> int:
        """Return the bytes that each of `size` ranks sends in a step; at most, if they make these shares of sums."""
        gradients = ring_bytes(self.gradient_bytes, size)
        if shares:
            gradients = bytes_of_uneven_all_reduce(self.gradient_bytes, size, max(shares))
        return round(gradients + (size - 1) * self.statistics_bytes)

    def seconds(self, size: int) -> float:
        """Return the seconds of a step in which `size` ranks exchange and cannot compute."""
        exposed = min(self.gradient_bytes, self.bucket_bytes)
        small = self.statistics * self.message_seconds if size > 1 else 0.0
        return all_reduce_seconds(exposed, size, self.alpha, self.beta) + small


def plan_data_parallel(
    candidates: Sequence[Candidate],
    batch_size: int,
    exchange: GradientSync,
    *,
    accumulate: int = 1,
    shares: Sequence[float] | None = None,
) -> Plan:
    """Return the plan with the fewest predicted seconds per step.

    Args:
        candidates: in order of ranks.
        batch_size: samples of a step over all ranks.
        exchange: what a step exchanges.
        accumulate: micro-batches of a step.
        shares: relative shares to use instead of the best ones; every candidate then takes part.

    Raises:
        DoesNotFit: all candidates together cannot hold a micro-batch; the message says which `accumulate` would fit.
    """
    require(bool(candidates), "nodes", len(candidates), "at least one")
    trial = _Trial(candidates, batch_size, exchange, accumulate)
    if shares is not None:
        workers = weights_to_workers(shares, [c.worker.max_units for c in candidates])
        plan = trial.plan(range(len(candidates)), trial.divide(workers), ())
        reasons = [msgspec.structs.replace(a, reason=f"share as requested; {a.reason}") for a in plan.assignments]
        return msgspec.structs.replace(plan, assignments=tuple(reasons))
    order = sorted(range(len(candidates)), key=lambda i: candidates[i].worker.seconds(trial.micro))
    members, sizes = trial.best_prefix(order)
    return trial.plan(members, sizes, tuple(trial.with_one_more(members, i) for i in order if i not in members))


def with_lines(plan: Plan, exchange: GradientSync, rates: Mapping[str, float]) -> Plan:
    """Return `plan` of replicas whose sums are divided by lines, of these bytes per second by node.

    Seconds stay as they are: `exchange` was measured with such sums.
    """
    shares = shares_among([one.node for one in plan.assignments], rates)
    if not shares or plan.prediction is None:
        return plan
    sent = exchange.sent_bytes(len(shares), shares)
    prediction = msgspec.structs.replace(plan.prediction, sent_bytes=sent)
    return msgspec.structs.replace(plan, line_rates=dict(rates), prediction=prediction)


def _relative_bytes(assignments: Sequence[Assignment], rates: Mapping[str, float]) -> float:
    """Return the bytes that a rank sends for each byte of gradients, at most."""
    shares = shares_among([one.node for one in assignments], rates)
    return bytes_of_uneven_all_reduce(1, len(shares), max(shares)) if shares else ring_bytes(1, len(assignments))


@dataclass(frozen=True)
class _Trial:
    """The job that is divided among the participating candidates."""

    candidates: Sequence[Candidate]
    batch_size: int
    exchange: GradientSync
    accumulate: int

    @property
    def micro(self) -> int:
        """The samples of a micro-batch."""
        return -(-self.batch_size // self.accumulate)

    def workers(self, members: Sequence[int]) -> list[NodeCost]:
        """Return the workers of some candidates."""
        return [self.candidates[i].worker for i in members]

    def divide(self, workers: Sequence[NodeCost]) -> tuple[int, ...]:
        """Call `apportion` and add the accumulation that would fit to its error. Raises DoesNotFit."""
        try:
            return apportion(self.micro, workers)
        except DoesNotFit as error:
            capacity = sum(int(w.capacity) for w in workers)
            advice = f"; use --accumulate {-(-self.batch_size // capacity)}" if capacity else ""
            raise DoesNotFit(f"{error}{advice}") from error

    def computing(self, members: Sequence[int], sizes: Sequence[int]) -> float:
        """Return the seconds per step that the slowest of `members` computes."""
        return self.accumulate * finish_seconds(sizes, self.workers(members))

    def seconds(self, members: Sequence[int], sizes: Sequence[int]) -> float:
        """Return the seconds of a step of `members`."""
        return self.computing(members, sizes) + self.exchange.seconds(len(members))

    def best_prefix(self, order: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """Return members (in order of ranks) and sizes of the fastest prefix of `order`. Raises DoesNotFit."""
        best: tuple[float, list[int], tuple[int, ...]] | None = None
        for k in range(1, len(order) + 1):
            members = sorted(order[:k])
            if k < len(order) and sum(worker.capacity for worker in self.workers(members)) < self.micro:
                continue
            sizes = self.divide(self.workers(members))
            if min(sizes) == 0 and best is not None:
                continue
            seconds = self.seconds(members, sizes)
            if best is None or seconds < best[0] * _MAX_STEP_RATIO:
                best = (seconds, members, sizes)
        assert best is not None, "the last prefix holds all candidates, for which divide() returned or raised"
        return best[1:]

    def with_one_more(self, members: Sequence[int], index: int) -> Rejected:
        """Return the predicted step with the additional candidate `index`."""
        trial = sorted([*members, index])
        sizes = apportion(self.micro, self.workers(trial))
        too_slow = sizes[trial.index(index)] == 0
        idle = "the other nodes finish all samples before this node has finished one"
        reason = idle if too_slow else "the step would not be shorter with it"
        return Rejected(
            what=self.candidates[index].node, reason=reason, step_seconds=self.seconds(trial, sizes), is_node=True
        )

    def plan(self, members: Sequence[int], sizes: Sequence[int], rejected: tuple[Rejected, ...]) -> Plan:
        """Return the plan of `members` with micro-batches of `sizes`."""
        fastest = min(worker.seconds(max(sizes)) for worker in self.workers(members))
        assignments = tuple(
            _assignment(rank, self.candidates[i], n, fastest / self.candidates[i].worker.seconds(max(sizes)))
            for rank, (i, n) in enumerate(zip(members, sizes, strict=True))
        )
        return Plan(
            strategy="data" if len(members) > 1 else "serial",
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            assignments=assignments,
            prediction=self._prediction(members, sizes),
            rejected=rejected,
        )

    def _prediction(self, members: Sequence[int], sizes: Sequence[int]) -> Prediction:
        alone = [c.worker.seconds(self.micro) for c in self.candidates if c.worker.capacity >= self.micro]
        return Prediction(
            step_seconds=self.seconds(members, sizes),
            compute_seconds=self.computing(members, sizes),
            communication_seconds=self.exchange.seconds(len(members)),
            sent_bytes=self.exchange.sent_bytes(len(members)),
            alone_seconds=self.accumulate * min(alone) if alone else None,
        )


def fitted_to_step_profile(plan: Plan, computing: Sequence[float]) -> Plan:
    """Return `plan` with sample costs, and single-device seconds, scaled to agree with a profiled step.

    The costs were fitted at another time than the step was profiled, when the machines may have been more or less busy.
    Without scaling, the comparison could claim that two equal nodes are four times as fast as one.

    Args:
        plan: data-parallel plan, predicted from the profiled step.
        computing: seconds that each rank computed in that step.
    """
    assignments = tuple(
        _scaled(assignment, seconds / plan.accumulate)
        for assignment, seconds in zip(plan.assignments, computing, strict=True)
    )
    plan = msgspec.structs.replace(plan, assignments=assignments)
    assert plan.prediction is not None
    prediction = msgspec.structs.replace(plan.prediction, alone_seconds=_alone_seconds(plan))
    return msgspec.structs.replace(plan, prediction=prediction)


def _scaled(assignment: Assignment, seconds: float) -> Assignment:
    """Return `one` with costs that predict `seconds` for its samples."""
    predicted = assignment.fixed_seconds + assignment.samples * assignment.sample_seconds
    if not (assignment.samples and assignment.sample_seconds and seconds > 0):
        return assignment
    factor = seconds / predicted
    return msgspec.structs.replace(
        assignment, fixed_seconds=factor * assignment.fixed_seconds, sample_seconds=factor * assignment.sample_seconds
    )


def _alone_seconds(plan: Plan) -> float | None:
    """Return the seconds of a step on the fastest node that holds it alone; None if none does or one was not timed."""
    if not all(assignment.sample_seconds for assignment in plan.assignments):
        return None
    workers = [worker_of_assignment(assignment) for assignment in plan.assignments]
    alone = [worker.seconds(plan.micro_batch_size) for worker in workers if worker.capacity >= plan.micro_batch_size]
    return plan.accumulate * min(alone) if alone else None


def worker_of_assignment(assignment: Assignment, min_units: int = 0) -> NodeCost:
    """Return the cost of samples on the node of an assignment that was timed."""
    return NodeCost(
        unit_seconds=assignment.sample_seconds,
        fixed_seconds=assignment.fixed_seconds,
        max_units=assignment.max_samples,
        min_units=min_units,
    )


def reapportioned(plan: Plan, members: Sequence[int] | None = None) -> Plan:
    """Return `plan` with samples redistributed by their current costs, among all its ranks or `members` only.

    The part of a step that is not computing stays as predicted; a single rank does not wait.

    Args:
        plan: data-parallel plan with sample costs and a prediction.
        members: ranks that take part; all by default.
    """
    ranks = range(len(plan.assignments)) if members is None else members
    chosen = [plan.assignments[rank] for rank in ranks]
    workers = [worker_of_assignment(assignment, min_units=min(1, assignment.samples)) for assignment in chosen]
    sizes, before = apportion(plan.micro_batch_size, workers), plan.prediction
    assert before is not None
    fastest = min(worker.seconds(max(sizes)) for worker in workers)
    candidates = [
        Candidate(node=assignment.node, device=assignment.device, worker=worker_of_assignment(assignment))
        for assignment in chosen
    ]
    computing = plan.accumulate * finish_seconds(sizes, workers)
    is_alone = len(chosen) == 1
    other_seconds = 0.0 if is_alone else max(0.0, before.step_seconds - before.compute_seconds)
    all_bytes = _relative_bytes(plan.assignments, plan.line_rates)
    shrink = _relative_bytes(chosen, plan.line_rates) / all_bytes if all_bytes else 0.0
    return msgspec.structs.replace(
        plan,
        strategy="serial" if is_alone else plan.strategy,
        assignments=tuple(
            _assignment(rank, candidate, n, fastest / candidate.worker.seconds(max(sizes)))
            for rank, (candidate, n) in enumerate(zip(candidates, sizes, strict=True))
        ),
        prediction=msgspec.structs.replace(
            before,
            step_seconds=computing + other_seconds,
            compute_seconds=computing,
            communication_seconds=0.0 if is_alone else before.communication_seconds,
            waiting_seconds=0.0 if is_alone else before.waiting_seconds,
            sent_bytes=round(before.sent_bytes * shrink),
        ),
    )


def without_slow_nodes(plan: Plan) -> Plan | None:
    """Return `plan` without nodes that make its steps much longer; None if there are no such nodes.

    Args:
        plan: data-parallel plan with sample costs that agree with its prediction.
    """
    members = faster_members(
        [worker_of_assignment(assignment) for assignment in plan.assignments],
        [assignment.samples for assignment in plan.assignments],
        plan.accumulate,
        plan.prediction.step_seconds if plan.prediction else 0.0,
    )
    if members is None:
        return None
    assert plan.prediction is not None
    fewer, seconds = reapportioned(plan, members[0]), plan.prediction.step_seconds
    removed = [assignment.node for rank, assignment in enumerate(plan.assignments) if rank not in members[0]]
    reasons = (
        Rejected(what=node, reason="the profiled step is longer with it", step_seconds=seconds, is_node=True)
        for node in removed
    )
    return msgspec.structs.replace(fewer, rejected=(*plan.rejected, *reasons))


def faster_members(
    workers: Sequence[NodeCost], sizes: Sequence[int], accumulate: int, step_seconds: float
) -> tuple[list[int], float] | None:
    """Return the subset of `workers` with a much shorter step, in order, and its seconds; None if all are needed.

    Args:
        workers: cost of samples on each rank.
        sizes: samples of each rank in a micro-batch.
        accumulate: micro-batches of a step.
        step_seconds: seconds of a step of all ranks. Time not spent computing stays, unless a single rank remains.
    """
    samples = sum(sizes)
    other_seconds = max(0.0, step_seconds - accumulate * finish_seconds(sizes, workers))
    order = sorted(range(len(workers)), key=lambda rank: workers[rank].seconds(samples))
    best: tuple[list[int], float] | None = None
    for count in range(1, len(order)):
        members = sorted(order[:count])
        chosen = [workers[rank] for rank in members]
        if sum(worker.capacity for worker in chosen) < samples:
            continue
        computing = accumulate * finish_seconds(apportion(samples, chosen), chosen)
        seconds = computing + (other_seconds if count > 1 else 0.0)
        if seconds < (_MAX_STEP_RATIO_WITHOUT * step_seconds if best is None else _MAX_STEP_RATIO * best[1]):
            best = members, seconds
    return best


def _assignment(rank: int, candidate: Candidate, samples: int, speed: float) -> Assignment:
    worker, reason = candidate.worker, f"speed {speed:.2f} of the fastest"
    if worker.max_units is not None and samples == worker.max_units:
        reason = f"memory holds no more than {worker.max_units}; {reason}"
    return Assignment(
        rank=rank,
        node=candidate.node,
        device=candidate.device,
        samples=samples,
        fixed_seconds=worker.fixed_seconds,
        sample_seconds=worker.unit_seconds,
        max_samples=worker.max_units,
        reason=reason,
    )


Rows = Sequence[Sequence[int]]
"""The ranks of every replica."""


def samples_of_replicas(rows: Rows, speeds: Sequence[float], samples: int) -> tuple[int, ...]:
    """Return how many of `samples` each replica takes, in proportion to the summed speeds of its ranks.

    Args:
        rows: the ranks of each replica.
        speeds: speed of each rank, in any unit.
        samples: samples of a micro-batch.

    Raises:
        InvalidValue: there are fewer samples than replicas, or the ranks of a replica have no speed.
    """
    require(samples >= len(rows), "--batch-size", samples, f"at least the {len(rows)} replicas, for every micro-batch")
    replica_speeds = [sum(speeds[rank] for rank in row) for row in rows]
    require(min(replica_speeds) > 0, "--shares", list(speeds), "positive for at least one node of every replica")
    return apportion(samples, [NodeCost(unit_seconds=1 / speed) for speed in replica_speeds])


def plan_divided(
    strategy: Strategy,
    candidates: Sequence[Candidate],
    rows: Rows,
    speeds: Sequence[float],
    batch_size: int,
    *,
    accumulate: int = 1,
) -> Plan:
    """Return the plan of a model-parallel `strategy`; ranks of a replica share its work in proportion to their speeds.

    Args:
        strategy: divides filters, channels, rows or layers.
        candidates: all ranks.
        rows: the ranks of each replica.
        speeds: relative speed of each rank.
        batch_size: samples of a step over all replicas.
        accumulate: micro-batches of a step.

    Raises:
        InvalidValue: there is not a sample for every replica, or a replica has no speed.
    """
    sizes = samples_of_replicas(rows, speeds, -(-batch_size // accumulate))
    assignments = []
    for index, (row, samples) in enumerate(zip(rows, sizes, strict=True)):
        replica_speed = sum(speeds[rank] for rank in row)
        for rank in row:
            candidate, share = candidates[rank], speeds[rank] / replica_speed
            assignments.append(
                Assignment(
                    rank=rank,
                    node=candidate.node,
                    device=candidate.device,
                    samples=samples,
                    fixed_seconds=candidate.worker.fixed_seconds,
                    sample_seconds=candidate.worker.unit_seconds,
                    reason=f"{share:.0%} of the speed of its replica",
                    replica=index,
                    share=share,
                )
            )
    return Plan(strategy=strategy, batch_size=batch_size, accumulate=accumulate, assignments=tuple(assignments))
