"""Messages between workers and the server, without the arrays, and results for records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from evener.agreements.settings import Compression
from evener.records.schema import Count, Loss, Part, Seconds, Text, require_measured

MAX_UNUSED = 8192
"""Limit of unused parameters in one contribution, and in the merged ones of an answer."""
MAX_MERGED = 512
"""Limit of merged contributions in an answer."""
Unused = Annotated[tuple[Count, ...], Meta(max_length=MAX_UNUSED)]
Verdict = Literal["applied", "refused", "duplicate", "late"]
Range = tuple[Count, Count]
"""First position and number of positions."""


class SampleRange(Part, frozen=True, kw_only=True, array_like=True):
    """Some samples of one epoch: `ranges` of positions in its order."""

    epoch: Count
    ranges: tuple[Range, ...]

    @property
    def num_samples(self) -> int:
        """Samples in all ranges."""
        total = 0
        for _, count in self.ranges:
            total += count
        return total


def positions(samples: SampleRange) -> NDArray[np.int64]:
    """Return the positions of `samples` in the order of their epoch, in the order of their use."""
    return np.concatenate([np.arange(first, first + count) for first, count in samples.ranges])


class Lease(Part, frozen=True, kw_only=True, array_like=True):
    """Work for one worker: until it is answered or returned, no other worker has these samples.

    Attributes:
        number: increasing number, unique in the server's life.
        version: version of the weights when it was assigned.
        samples: samples to use.
        num_steps: local steps, each with the agreement's batch, the last perhaps with fewer samples.
    """

    number: Count
    version: Count
    samples: SampleRange
    num_steps: Count = 1

    @property
    def num_samples(self) -> int:
        """Number of samples to use."""
        return self.samples.num_samples


class Push(Part, frozen=True, kw_only=True, array_like=True):
    """Header of a worker's contribution.

    Attributes:
        number: number of the lease that it answers.
        seconds: seconds of the work, without waiting and sending; 0 if they are not known.
        loss: mean over the samples; None if it is not finite, or too large to be summed.
        unused: indices in the layout of parameters that the gradient did not reach.
    """

    number: Count
    seconds: Seconds
    loss: Loss | None = None
    unused: Unused = ()

    def __post_init__(self) -> None:
        require_measured(self, "seconds")


Contents = Literal["nothing", "weights", "difference", "merged"]


class Answer(Part, frozen=True, kw_only=True, array_like=True):
    """The server's answer to a worker; a worker without a lease waits for the next answer.

    Attributes:
        version: version of the weights.
        answers: number of the lease whose contribution this answers; None for none.
        verdict: verdict on that contribution.
        reason: reason of a refusal.
        contents: meaning of the attached bytes: nothing; the weights, followed by the state of the server's optimizer
            where workers update their copies; their difference to the worker's last ones; or the merged contributions
            of the updates since.
        base: version of these last ones; None: the difference is to zeros.
        lease: next work.
        resets_leases: whether all earlier leases are void; valid ones are sent again.
        is_last: whether the run is over.
        compression: encoding of the worker's contributions and differences from now on, for a slow link; none: that of
            the agreement.
        unused: of each attached merged contribution, indices in the layout of parameters that it did not reach; empty
            if each reached all.
    """

    version: Count
    answers: Count | None = None
    verdict: Verdict | None = None
    reason: Text = ""
    contents: Contents = "nothing"
    base: Count | None = None
    lease: Lease | None = None
    resets_leases: bool = False
    is_last: bool = False
    compression: Compression = "none"
    unused: Annotated[tuple[Unused, ...], Meta(max_length=MAX_MERGED)] = ()


class Update(Part, frozen=True, kw_only=True):
    """One update of the common weights, for the record.

    Attributes:
        version: version of the weights after it.
        epoch: latest epoch of its samples; where rounds skip late workers, of those of earlier updates as well.
        num_samples: samples that it learned from.
        loss: mean over them, of contributions with a loss; None if there are none.
        staleness: updates between the weights that a worker computed with and those that it changed, by worker.
    """

    version: int
    epoch: int
    num_samples: int
    loss: float | None
    staleness: dict[str, int]


class WorkerTotals(msgspec.Struct, kw_only=True):
    """Totals of one worker, which the server continues to count.

    Attributes:
        applied: contributions that went into the weights.
        num_samples: samples of these.
        duplicate: contributions that had arrived before.
        late: contributions whose lease had been returned.
        refused: contributions that were not finite, were outliers, or had the wrong size.
        samples_refused: samples of these, which were not learned from.
        dismissed: number of times that it was sent away or lost.
        staleness: staleness of all its contributions together.
        most_stale: largest staleness of one contribution.
        clipped: contributions that were much longer than usual, and shortened.
    """

    applied: int = 0
    num_samples: int = 0
    duplicate: int = 0
    late: int = 0
    refused: int = 0
    samples_refused: int = 0
    dismissed: int = 0
    staleness: int = 0
    most_stale: int = 0
    clipped: int = 0


class Judgement(msgspec.Struct, frozen=True):
    """The verdict on a contribution.

    Attributes:
        worker: name of the worker.
        number: number of the lease that it answered.
        verdict: verdict.
        reason: reason of a refusal.
        lease: lease that it answered; None if it was late, or a duplicate.
        num_samples: samples of that lease.
        seconds: believed seconds of the work.
        expels: whether the worker has to be expelled.
        num_bytes: number of bytes received.
    """

    worker: str
    number: int
    verdict: Verdict
    reason: str = ""
    lease: Lease | None = None
    num_samples: int = 0
    seconds: float = 0.0
    expels: bool = False
    num_bytes: int = 0


class WorkerReply(msgspec.Struct, frozen=True):
    """An answer to send to a worker, with its bytes, which do not change while this is held."""

    worker: str
    answer: Answer
    image: memoryview | None = None


@dataclass(slots=True)
class ServerOutput:
    """The results of a message: answers to send, updates, and final judgements."""

    replies: list[WorkerReply] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
