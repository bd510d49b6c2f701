"""Plans by what the nodes of a run were measured to take: data parallelism, and replicas that hold a model together.

Of data parallelism, the candidates are taken from the fastest on; one more joins as long as the predicted step gets
shorter by it. A step takes the slowest rank's computing plus the exchange that no backward pass hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.errors import DoesNotFit, require
from evener.oracle.apportion import Worker, apportion, finish_seconds, weights_to_workers
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.plan import Assignment, Plan, Prediction, Rejected, Strategy

_WORTH = 0.99
"""One more node has to bring a step to this fraction of what it was: a predicted gain below 1 % is noise."""


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
