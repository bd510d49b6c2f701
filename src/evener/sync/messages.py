"""What workers and the server tell each other, apart from the arrays, and what is told to whoever keeps records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from evener.records.schema import Count, Loss, Part, Seconds, Text
from evener.sync.protocol import Compression

MAX_UNUSED = 8192
"""Parameters that one contribution may name."""
Verdict = Literal["applied", "refused", "duplicate", "late"]
Range = tuple[Count, Count]
"""First position and number of positions."""


class SampleRange(Part, frozen=True, kw_only=True, array_like=True):
    """Some samples of one epoch: `ranges` of positions in its order."""

    epoch: Count
    ranges: tuple[Range, ...]

    @property
    def num_samples(self) -> int:
        """In all ranges."""
        total = 0
        for _, count in self.ranges:
            total += count
        return total


def positions(samples: SampleRange) -> NDArray[np.int64]:
    """The positions of `samples` in the order of their epoch, in the order in which they are to be used."""
    return np.concatenate([np.arange(first, first + count) for first, count in samples.ranges])


class Lease(Part, frozen=True, kw_only=True, array_like=True):
    """Work for one worker: until it is answered for or taken back, nobody else has these samples.

    Attributes:
        number: unique in the server's life, growing.
        version: of the weights when it was given.
        samples: to use up.
        num_steps: local steps to use them up in, each with the agreement's batch, the last perhaps with fewer.
    """

    number: Count
    version: Count
    samples: SampleRange
    num_steps: Count = 1

    @property
    def num_samples(self) -> int:
        """Samples to be used."""
        return self.samples.num_samples


class Push(Part, frozen=True, kw_only=True, array_like=True):
    """What goes with a worker's contribution.

    Attributes:
        number: of the lease that it answers.
        seconds: that the work took, without waiting and sending.
        loss: mean over the samples; None if it is not finite, or too large to be summed.
        unused: places in the layout of parameters that the gradient did not reach.
    """

    number: Count
    seconds: Seconds
    loss: Loss | None = None
    unused: Annotated[tuple[Count, ...], Meta(max_length=MAX_UNUSED)] = ()


class Answer(Part, frozen=True, kw_only=True, array_like=True):
    """What a worker hears of the server; whoever holds no lease waits for the next answer.

    Attributes:
        version: of the weights.
        answers: number of the lease whose contribution this answers; None if it comes unasked.
        verdict: on that contribution.
        reason: of a refusal.
        contents: of the bytes that come along: nothing, the weights, or their difference to the worker's last ones.
        base: version of these, if it is a difference; None: it is one to nothing but zeros.
        lease: the next work.
        is_anew: whether all leases that were heard of before are void; those that hold are told again.
        is_last: whether the run is over.
        compression: how the worker's contributions and differences are written from now on, for its line is thin;
            none: as agreed.
    """

    version: Count
    answers: Count | None = None
    verdict: Verdict | None = None
    reason: Text = ""
    contents: Literal["nothing", "weights", "difference"] = "nothing"
    base: Count | None = None
    lease: Lease | None = None
    is_anew: bool = False
    is_last: bool = False
    compression: Compression = "none"


class Update(Part, frozen=True, kw_only=True):
    """One update of the common weights, for the record.

    Attributes:
        version: of the weights after it.
        epoch: of its samples, the latest.
        num_samples: that it learned from.
        loss: mean over them, of those contributions that told one; None if none did.
        staleness: by worker: versions between the weights that it worked on and those that it changed.
    """

    version: int
    epoch: int
    num_samples: int
    loss: float | None
    staleness: dict[str, int]


class WorkerTotals(msgspec.Struct, kw_only=True):
    """What one worker did so far; the server goes on counting in it.

    Attributes:
        applied: contributions that went into the weights.
        num_samples: in these.
        duplicate: contributions that had come before.
        late: contributions whose lease had been taken back.
        refused: contributions that were not finite, opposed all others, or were of the wrong size.
        samples_refused: in these; nobody learned from them.
        dismissed: how often it was sent away or lost.
        staleness: of all its contributions together.
        most_stale: of one contribution.
        clipped: contributions that were much longer than is usual, and shortened.
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
    """What became of a contribution.

    Attributes:
        worker: whose it was.
        number: of the lease that it answered.
        verdict: on it.
        reason: of a refusal.
        lease: that it answered; None if it was late, or a duplicate.
        num_samples: of that lease.
        seconds: that the work took, as far as they can be believed.
        expels: whether the worker is to be sent away for it, and for good.
        num_bytes: in which it came.
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
    """An answer to be sent: to whom, and the bytes that go along; they stay as they are while this is held."""

    worker: str
    answer: Answer
    image: memoryview | None = None


@dataclass(slots=True)
class ServerOutput:
    """What came of a message: what to send, and what to record of contributions that were judged for good."""

    replies: list[WorkerReply] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
