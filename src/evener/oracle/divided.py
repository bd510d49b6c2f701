"""Plans of strategies in which several ranks hold one model together: who is in which replica, with how much of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evener.errors import require
from evener.oracle.apportion import Worker, apportion
from evener.oracle.data_parallel import Candidate
from evener.plan import Assignment, Plan, Prediction, Strategy

Rows = Sequence[Sequence[int]]
"""The ranks of every replica."""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """What the ranks tell each other in a step, and what that takes.

    Attributes:
        sent: of every rank, bytes by kind, of one micro-batch; `gradients` once a step.
        exchanges: in which ranks take part in forward and backward of a micro-batch.
        alpha: seconds of latency of one step of a ring.
        beta: seconds per byte.
        message_seconds: of one exchange.
    """

    sent: Sequence[Mapping[str, float]]
    exchanges: int
    alpha: float
    beta: float
    message_seconds: float

    def bytes_sent(self, rank: int, micro_batches: int) -> float:
        """By `rank` in a step of so many micro-batches."""
        own = self.sent[rank]
        return sum(nbytes * (1 if kind == "gradients" else micro_batches) for kind, nbytes in own.items())

    def seconds(self, rank: int, micro_batches: int) -> float:
        """In which `rank` exchanges."""
        latency = micro_batches * self.exchanges * self.message_seconds
        return latency + self.bytes_sent(rank, micro_batches) * self.beta


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
    talk: Talk | None = None,
) -> Plan:
    """The plan of `strategy`, in which ranks of a replica have shares of its work in proportion to their speeds.

    Args:
        strategy: with filters, channels, rows or layers divided.
        candidates: all ranks.
        rows: of every replica, its ranks.
        speeds: relative, one a rank.
        batch_size: samples of a step over all replicas.
        accumulate: micro-batches of a step.
        talk: what is exchanged; without it nothing is predicted.

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
    prediction = _prediction(candidates, assignments, batch_size, accumulate, talk) if talk else None
    return Plan(
        strategy=strategy,
        batch_size=batch_size,
        accumulate=accumulate,
        assignments=tuple(assignments),
        prediction=prediction,
    )


def _prediction(
    candidates: Sequence[Candidate], assignments: Sequence[Assignment], batch_size: int, accumulate: int, talk: Talk
) -> Prediction:
    computing = [_computing(a, accumulate) for a in assignments]
    telling = [talk.seconds(a.rank, accumulate) for a in assignments]
    slowest = max(range(len(assignments)), key=lambda rank: computing[rank] + telling[rank])
    alone = [accumulate * one.worker.seconds(-(-batch_size // accumulate)) for one in candidates]
    words = ("computing of the slowest rank", "exchanges within the layers")
    return Prediction(
        step_seconds=computing[slowest] + telling[slowest],
        compute_seconds=computing[slowest],
        communication_seconds=telling[slowest],
        sent_bytes=round(max(talk.bytes_sent(a.rank, accumulate) for a in assignments)),
        alone_seconds=min(alone),
        bottleneck=words[computing[slowest] < telling[slowest]],
    )


def _computing(assignment: Assignment, accumulate: int) -> float:
    """Seconds of a rank's part of a step."""
    return accumulate * (assignment.fixed_seconds + assignment.share * assignment.samples * assignment.sample_seconds)
