"""Plans by what the nodes of a run were measured to take: data parallelism, and replicas that hold a model together.

Of data parallelism, the candidates are taken from the fastest on; one more joins as long as the predicted step gets
shorter by it. A step takes the slowest rank's computing plus the exchange that no backward pass hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from evener.oracle.apportion import Worker, apportion, finish_seconds, weights_to_workers
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.records.errors import DoesNotFit, require
from evener.records.plan import Assignment, Plan, Prediction, Rejected, Strategy

_WORTH = 0.99
"""One more node has to bring a step to this fraction of what it was: a predicted gain below 1 % is noise."""
_MUCH_SHORTER = 0.9
"""Planned nodes are left out if a step then takes this fraction: a smaller gain may be noise of the rehearsal."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A device that could take part.

    Attributes:
        node: name of its machine.
        device: as PyTorch names it.
        worker: what a micro-batch of n samples costs it, and the most that its memory holds.
    """

    node: str
    device: str
    worker: Worker


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """What the ranks have to tell each other in a step, and over what.

    Attributes:
        gradient_bytes: of all weight gradients.
        statistics: number of small exchanges in forward and backward (BatchNorm), which nothing hides.
        statistics_bytes: that a rank sends to each other one in these.
        message_seconds: of one small exchange.
        alpha: seconds of latency of one step of a ring.
        beta: seconds per byte.
        bucket_bytes: of the last bucket of gradients, the one that no backward pass hides.
    """

    gradient_bytes: int
    statistics: int = 0
    statistics_bytes: int = 0
    message_seconds: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    bucket_bytes: int = 25 * 2**20

    def sent_bytes(self, size: int) -> int:
        """Bytes that each of `size` ranks sends in a step."""
        return round(ring_bytes(self.gradient_bytes, size) + (size - 1) * self.statistics_bytes)

    def seconds(self, size: int) -> float:
        """Seconds of a step in which `size` ranks exchange and cannot compute meanwhile."""
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
    """The plan of least predicted seconds per step for `batch_size` samples.

    Args:
        candidates: in the order of ranks.
        batch_size: samples of a step over all ranks.
        exchange: what a step exchanges.
        accumulate: micro-batches of a step.
        shares: relative shares to take instead of the best ones; then every candidate takes part.

    Raises:
        DoesNotFit: all candidates together cannot hold a micro-batch; says which `accumulate` would fit.
    """
    require(bool(candidates), "nodes", len(candidates), "at least one")
    trial = _Trial(candidates, batch_size, exchange, accumulate)
    if shares is not None:
        workers = weights_to_workers(shares, [c.worker.most for c in candidates])
        return trial.plan(range(len(candidates)), trial.divide(workers), ())
    order = sorted(range(len(candidates)), key=lambda i: candidates[i].worker.seconds(trial.micro))
    members, sizes = trial.best_prefix(order)
    return trial.plan(members, sizes, tuple(trial.with_one_more(members, i) for i in order if i not in members))


@dataclass(frozen=True)
class _Trial:
    """What is divided among whichever candidates take part."""

    candidates: Sequence[Candidate]
    batch_size: int
    exchange: GradientSync
    accumulate: int

    @property
    def micro(self) -> int:
        """Samples of a micro-batch."""
        return -(-self.batch_size // self.accumulate)

    def workers(self, members: Sequence[int]) -> list[Worker]:
        """Those of some candidates."""
        return [self.candidates[i].worker for i in members]

    def divide(self, workers: Sequence[Worker]) -> tuple[int, ...]:
        """`apportion`, whose error says which accumulation would fit. Raises DoesNotFit."""
        try:
            return apportion(self.micro, workers)
        except DoesNotFit as error:
            room = sum(int(w.room) for w in workers)
            advice = f"; use --accumulate {-(-self.batch_size // room)}" if room else ""
            raise DoesNotFit(f"{error}{advice}") from error

    def computing(self, members: Sequence[int], sizes: Sequence[int]) -> float:
        """Seconds of a step in which the slowest of `members` computes."""
        return self.accumulate * finish_seconds(sizes, self.workers(members))

    def seconds(self, members: Sequence[int], sizes: Sequence[int]) -> float:
        """Of a step of `members`."""
        return self.computing(members, sizes) + self.exchange.seconds(len(members))

    def best_prefix(self, order: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """The members (in order of ranks) and their sizes of the best k first of `order`. Raises DoesNotFit."""
        best: tuple[float, list[int], tuple[int, ...]] | None = None
        for k in range(1, len(order) + 1):
            members = sorted(order[:k])
            if k < len(order) and sum(worker.room for worker in self.workers(members)) < self.micro:
                continue
            sizes = self.divide(self.workers(members))
            if min(sizes) == 0 and best is not None:
                continue
            seconds = self.seconds(members, sizes)
            if best is None or seconds < best[0] * _WORTH:
                best = (seconds, members, sizes)
        assert best is not None, "the last k is everybody, who either fit or raise"
        return best[1:]

    def with_one_more(self, members: Sequence[int], index: int) -> Rejected:
        """What a step would take with candidate `index`, who is no member."""
        trial = sorted([*members, index])
        sizes = apportion(self.micro, self.workers(trial))
        too_slow = sizes[trial.index(index)] == 0
        alone = "by the time it had done one sample, the others have done all"
        reason = alone if too_slow else "a step would be no shorter with it"
        return Rejected(what=self.candidates[index].node, reason=reason, step_seconds=self.seconds(trial, sizes))

    def plan(self, members: Sequence[int], sizes: Sequence[int], rejected: tuple[Rejected, ...]) -> Plan:
        """Of `members` with micro-batches of `sizes`."""
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
        alone = [c.worker.seconds(self.micro) for c in self.candidates if c.worker.room >= self.micro]
        return Prediction(
            step_seconds=self.seconds(members, sizes),
            compute_seconds=self.computing(members, sizes),
            communication_seconds=self.exchange.seconds(len(members)),
            sent_bytes=self.exchange.sent_bytes(len(members)),
            alone_seconds=self.accumulate * min(alone) if alone else None,
        )


def fitted_to_rehearsal(plan: Plan, computing: Sequence[float]) -> Plan:
    """`plan` whose costs of samples, and whose step on one device alone, agree with a step that was rehearsed.

    What was fitted before and what was rehearsed can differ: the machines may have been busier at one time than at the
    other. Compared with each other they could tell that two equal nodes are four times as fast as one.

    Args:
        plan: of whole models, predicted by the rehearsed step.
        computing: seconds of every rank in that step.
    """
    assignments = tuple(
        _scaled(one, seconds / plan.accumulate) for one, seconds in zip(plan.assignments, computing, strict=True)
    )
    plan = msgspec.structs.replace(plan, assignments=assignments)
    assert plan.prediction is not None
    prediction = msgspec.structs.replace(plan.prediction, alone_seconds=_alone_seconds(plan))
    return msgspec.structs.replace(plan, prediction=prediction)


def _scaled(one: Assignment, seconds: float) -> Assignment:
    """`one` whose samples are predicted to take `seconds`."""
    predicted = one.fixed_seconds + one.samples * one.sample_seconds
    if not (one.samples and one.sample_seconds and seconds > 0):
        return one
    factor = seconds / predicted
    return msgspec.structs.replace(
        one, fixed_seconds=factor * one.fixed_seconds, sample_seconds=factor * one.sample_seconds
    )


def _alone_seconds(plan: Plan) -> float | None:
    """Of a step on the fastest node that holds it alone; None if none does, or a node was not timed."""
    if not all(one.sample_seconds for one in plan.assignments):
        return None
    workers = [worker_of_assignment(one) for one in plan.assignments]
    alone = [worker.seconds(plan.micro_batch_size) for worker in workers if worker.room >= plan.micro_batch_size]
    return plan.accumulate * min(alone) if alone else None


def worker_of_assignment(one: Assignment, least: int = 0) -> Worker:
    """What samples cost the node of an assignment that was timed."""
    return Worker(unit_seconds=one.sample_seconds, fixed_seconds=one.fixed_seconds, most=one.max_samples, least=least)


def divided_anew(plan: Plan, members: Sequence[int] | None = None) -> Plan:
    """`plan` with samples by what they cost now, among all its ranks or the `members` alone.

    What a step takes besides computing stays as predicted; a single rank waits for nobody.

    Args:
        plan: of whole models, with costs of samples and a prediction.
        members: ranks that take part.
    """
    ranks = range(len(plan.assignments)) if members is None else members
    chosen = [plan.assignments[rank] for rank in ranks]
    workers = [worker_of_assignment(one, least=min(1, one.samples)) for one in chosen]
    sizes, before = apportion(plan.micro_batch_size, workers), plan.prediction
    assert before is not None
    fastest = min(worker.seconds(max(sizes)) for worker in workers)
    candidates = [Candidate(node=one.node, device=one.device, worker=worker_of_assignment(one)) for one in chosen]
    computing = plan.accumulate * finish_seconds(sizes, workers)
    is_alone = len(chosen) == 1
    besides = 0.0 if is_alone else max(0.0, before.step_seconds - before.compute_seconds)
    shrink = ring_bytes(1, len(chosen)) / ring_bytes(1, len(plan.assignments)) if len(plan.assignments) > 1 else 0.0
    return msgspec.structs.replace(
        plan,
        strategy="serial" if is_alone else plan.strategy,
        assignments=tuple(
            _assignment(rank, one, n, fastest / one.worker.seconds(max(sizes)))
            for rank, (one, n) in enumerate(zip(candidates, sizes, strict=True))
        ),
        prediction=msgspec.structs.replace(
            before,
            step_seconds=computing + besides,
            compute_seconds=computing,
            communication_seconds=0.0 if is_alone else before.communication_seconds,
            waiting_seconds=0.0 if is_alone else before.waiting_seconds,
            sent_bytes=round(before.sent_bytes * shrink),
        ),
    )


def without_slow_nodes(plan: Plan) -> Plan | None:
    """`plan` without nodes that make its steps much longer; None if there are none.

    Args:
        plan: of whole models, with costs of samples and a prediction that agree.
    """
    members = faster_members(
        [worker_of_assignment(one) for one in plan.assignments],
        [one.samples for one in plan.assignments],
        plan.accumulate,
        plan.prediction.step_seconds if plan.prediction else 0.0,
    )
    if members is None:
        return None
    assert plan.prediction is not None
    fewer, seconds = divided_anew(plan, members[0]), plan.prediction.step_seconds
    out = [one.node for rank, one in enumerate(plan.assignments) if rank not in members[0]]
    reasons = (
        Rejected(what=node, reason="a step would be longer with it, as rehearsed", step_seconds=seconds) for node in out
    )
    return msgspec.structs.replace(fewer, rejected=(*plan.rejected, *reasons))


def faster_members(
    workers: Sequence[Worker], sizes: Sequence[int], accumulate: int, step_seconds: float
) -> tuple[list[int], float] | None:
    """Some of `workers` among whom a step is much shorter, in order, with its seconds; None if it needs all of them.

    Args:
        workers: what samples cost each rank.
        sizes: samples of each rank in a micro-batch.
        accumulate: micro-batches of a step.
        step_seconds: that a step of all takes; what it takes besides computing stays, unless one rank is left.
    """
    samples = sum(sizes)
    besides = max(0.0, step_seconds - accumulate * finish_seconds(sizes, workers))
    order = sorted(range(len(workers)), key=lambda rank: workers[rank].seconds(samples))
    found: tuple[list[int], float] | None = None
    for count in range(1, len(order)):
        members = sorted(order[:count])
        chosen = [workers[rank] for rank in members]
        if sum(worker.room for worker in chosen) < samples:
            continue
        computing = accumulate * finish_seconds(apportion(samples, chosen), chosen)
        seconds = computing + (besides if count > 1 else 0.0)
        if seconds < (_MUCH_SHORTER * step_seconds if found is None else _WORTH * found[1]):
            found = members, seconds
    return found


def _assignment(rank: int, one: Candidate, samples: int, speed: float) -> Assignment:
    worker, reason = one.worker, f"speed {speed:.2f} of the fastest"
    if worker.most is not None and samples == worker.most:
        reason = f"memory holds no more than {worker.most}; {reason}"
    return Assignment(
        rank=rank,
        node=one.node,
        device=one.device,
        samples=samples,
        fixed_seconds=worker.fixed_seconds,
        sample_seconds=worker.unit_seconds,
        max_samples=worker.most,
        reason=reason,
    )


Rows = Sequence[Sequence[int]]
"""The ranks of every replica."""


def samples_of_replicas(rows: Rows, speeds: Sequence[float], samples: int) -> tuple[int, ...]:
    """How many of `samples` each replica takes: one is as fast as its ranks together.

    Args:
        rows: of every replica, its ranks.
        speeds: of the ranks, in any unit.
        samples: of a micro-batch.

    Raises:
        InvalidValue: there are fewer samples than replicas, or a replica whose ranks have no speed.
    """
    require(samples >= len(rows), "--batch-size", samples, f"at least the {len(rows)} replicas, for every micro-batch")
    together = [sum(speeds[rank] for rank in row) for row in rows]
    require(min(together) > 0, "--shares", list(speeds), "positive for a node of every replica")
    return apportion(samples, [Worker(unit_seconds=1 / speed) for speed in together])


def plan_divided(
    strategy: Strategy,
    candidates: Sequence[Candidate],
    rows: Rows,
    speeds: Sequence[float],
    batch_size: int,
    *,
    accumulate: int = 1,
) -> Plan:
    """The plan of `strategy`, in which ranks of a replica have shares of its work in proportion to their speeds.

    Args:
        strategy: with filters, channels, rows or layers divided.
        candidates: all ranks.
        rows: of every replica, its ranks.
        speeds: relative, one a rank.
        batch_size: samples of a step over all replicas.
        accumulate: micro-batches of a step.

    Raises:
        InvalidValue: there is not a sample for every replica, or a replica has no speed.
    """
    sizes = samples_of_replicas(rows, speeds, -(-batch_size // accumulate))
    assignments = []
    for index, (row, samples) in enumerate(zip(rows, sizes, strict=True)):
        together = sum(speeds[rank] for rank in row)
        for rank in row:
            one, share = candidates[rank], speeds[rank] / together
            assignments.append(
                Assignment(
                    rank=rank,
                    node=one.node,
                    device=one.device,
                    samples=samples,
                    fixed_seconds=one.worker.fixed_seconds,
                    sample_seconds=one.worker.unit_seconds,
                    reason=f"{share:.0%} of the speed of its replica",
                    replica=index,
                    share=share,
                )
            )
    return Plan(strategy=strategy, batch_size=batch_size, accumulate=accumulate, assignments=tuple(assignments))
