"""A submitted run: the task, its data and the agreement of the nodes; and how it reaches the master."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from evener.agreements.compression import as_bytes
from evener.agreements.layout import Flat, StateLayout
from evener.agreements.settings import AgreementSettings, Grouped, Workload
from evener.agreements.snapshot import require_free
from evener.ps.protocol.blob_transfer import StreamReceiver
from evener.ps.protocol.messages import BlobChunk, FetchBlob, RunRejected, Send
from evener.ps.protocol.rank_messages import MAX_RANK_JOB_BYTES, RankJob, decode_rank_job
from evener.records.decoding import decode_msgpack
from evener.records.errors import EvenerError, InvalidFile, require
from evener.records.schema import NOT_DECODED, Digest, Finite, Name, Part, RunName, Text, Whole, Word, shown
from evener.system.memory import usable_memory
from evener.wire.errors import BadFrame

MAX_JOB_BYTES = 2 * 2**20
MAX_JOBS_BYTES = 2 * MAX_JOB_BYTES
"""Limit of all runs in progress together."""
MIN_BYTES_PER_SECOND = 8000
"""Lowest mean rate of a submission, which keeps others waiting: less than a line of 100 kbit/s carries."""
MAX_PAUSE_S = 120.0
"""Longest time without progress of a submission: more than a piece of a blob takes over such a line."""


class Job(Part, frozen=True, kw_only=True):
    """A run whose nodes work on leases.

    Attributes:
        run: name of the run and of its folder, which is unique.
        task: name of a built-in task, or of a file in the blob `code`.
        title: name of the task, for people.
        code: blob with the task's file and the modules beside it; empty for a built-in task.
        data: blob with the data; empty if they do not travel.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        options: options of the task, as text.
        precision: precision of the computation.
        agreement_name: name of the agreement, as the user typed it.
        agreement: the agreement itself.
        workload: samples, and when the run ends.
        layout: layout of the model's state.
        fixed_sum: sum of the sizes of all parameters that are not trained, which each node makes itself; None if it is
            not known.
        num_validation: samples for validation after every epoch; 0 for none.
        has_accuracy: whether the task counts correct answers.
        submitter: name of the submitter at the master.
        reads_early: whether nodes begin before all data have come.
        nodes: names of the nodes that work for the run at present; none of them: the run is paused. None: all nodes
            work for it, and no other run may begin.
    """

    run: RunName
    task: Name
    title: Name
    code: Digest = ""
    data: Digest = ""
    data_dir: Text = ""
    options: dict[Name, Text] = {}
    precision: Word = "fp32"
    agreement_name: Word
    agreement: AgreementSettings
    workload: Workload
    layout: StateLayout
    fixed_sum: Finite | None = None
    num_validation: Whole = 0
    has_accuracy: bool = True
    submitter: Word = ""
    reads_early: bool = False
    nodes: tuple[Name, ...] | None = None

    def __post_init__(self) -> None:
        require(bool(self.run), "run", self.run, "a name")
        require_free(self.layout)
        has_rounds = self.agreement.local_steps == "epoch" and not self.agreement.is_overlapped
        require(has_rounds or not self.workload.parts, "parts", "given", "left out, but for rounds of whole epochs")
        outer, num_parameters = self.agreement.outer, sum(one.kind == "parameter" for one in self.layout.entries)
        fits = not isinstance(outer, Grouped) or len(outer.group_of) == num_parameters
        require(fits, "group_of", "another number", f"one group for each of {num_parameters} parameters")
        require(self.num_validation >= 0, "num_validation", self.num_validation, "zero or more")

    @property
    def blobs(self) -> tuple[str, ...]:
        """Blobs that a node needs before it can begin."""
        return tuple(digest for digest in (self.code, self.data) if digest)

    @property
    def rests(self) -> bool:
        """Whether the run is paused: no node works for it."""
        return self.nodes == ()

    def takes(self, node: str) -> bool:
        """Return whether a node of this name works for the run."""
        return self.nodes is None or node in self.nodes


AnyJob: TypeAlias = Job | RankJob


def exclude_each_other(job: AnyJob, other: AnyJob) -> bool:
    """Return whether two runs cannot go on at a time, because a node works for one run only."""
    if job.nodes is None or other.nodes is None:
        return not job.rests and not other.rests
    return not set(job.nodes).isdisjoint(other.nodes)


def encode_job(job: Job) -> bytes:
    """Encode a job for a buffer, since layouts and learning rates can be longer than a header may be."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes | memoryview) -> Job:
    """Decode the job in a buffer. Raises InvalidFile: it is not a job."""
    try:
        return decode_msgpack(data, Job)
    except NOT_DECODED as error:
        raise InvalidFile(f"this is not a job: {error}") from error


class Submission(NamedTuple):
    """A complete submission.

    Attributes:
        peer: connection of the command.
        job: job to do.
        weights: initial weights; None where the ranks make them.
        submitted: time on the master's clock.
    """

    peer: int
    job: AnyJob
    weights: Flat | None
    submitted: float


@dataclass
class _Arriving:
    """The run that is being submitted.

    Attributes:
        peer: connection of the command.
        submitter: name of its user.
        is_admin: whether an admin submits it.
        weights_bytes: memory of its weights.
        until: time by which more has to arrive.
        received: bytes that have arrived of the message, or of the blobs.
        submission: the run, while its blobs arrive; None while its message arrives.
    """

    peer: int
    submitter: str
    is_admin: bool
    weights_bytes: int
    until: float
    received: int = 0
    submission: Submission | None = None


class Submissions:
    """Receives runs from commands, one at a time; close it.

    Args:
        blobs: folder for code and data.
        send: sends a message to a connection.
        clock: seconds.
        why_not: says why a run cannot begin now; empty if it can.
        room: returns the bytes of memory that the weights of another run may take.
    """

    def __init__(
        self,
        blobs: Path,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        why_not: Callable[[AnyJob], str] = lambda _: "",
        room: Callable[[], int] = lambda: usable_memory()[1] // 2,
    ) -> None:
        self._receiver, self._send, self._clock = StreamReceiver(blobs), send, clock
        self._why_not, self._room = why_not, room
        self._arriving: _Arriving | None = None

    def wants(self, peer: int, lengths: Sequence[int], submitter: str = "", *, is_admin: bool = False) -> bool:
        """Return whether to receive a job, alone or with weights.

        Raises:
            BadFrame: the job or the weights are too large.
        """
        if len(lengths) not in (1, 2) or lengths[0] > (MAX_RANK_JOB_BYTES if len(lengths) == 1 else MAX_JOB_BYTES):
            raise BadFrame(f"a run is a job of at most {MAX_JOB_BYTES} bytes, and perhaps weights")
        weights_bytes = sum(lengths[1:])
        if weights_bytes > (most := self._room()):
            raise BadFrame(f"weights of {weights_bytes} bytes are too large for this master, which could hold {most}")
        if self._refusal(peer):
            return False
        self._arriving = _Arriving(peer, submitter, is_admin, weights_bytes, self._clock() + MAX_PAUSE_S)
        return True

    def displace(self) -> int | None:
        """Forget the submission of a user who is no admin, since an admin submits a run; return its connection."""
        if self._arriving is None or self._arriving.is_admin:
            return None
        peer = self._arriving.peer
        self.close()
        return peer

    def stalled(self) -> int | None:
        """Return the connection whose submission is slower than `MIN_BYTES_PER_SECOND`; None without one."""
        arriving = self._arriving
        return None if arriving is None or self._clock() <= arriving.until else arriving.peer

    def arrived(self, peer: int, num_bytes: int) -> None:
        """Note that the first `num_bytes` of a submission, or of its blobs, have arrived."""
        arriving = self._arriving
        if arriving is not None and arriving.peer == peer:
            later = arriving.until + max(0, num_bytes - arriving.received) / MIN_BYTES_PER_SECOND
            arriving.received, arriving.until = num_bytes, min(later, self._clock() + MAX_PAUSE_S)

    def submit(self, peer: int, buffers: Sequence[memoryview], submitter: str = "") -> Submission | None:
        """Take the run that a command submits; return it if no blob of it is missing.

        Args:
            peer: connection of the command.
            buffers: job and weights; a job of ranks alone.
            submitter: name of the submitter.
        """
        refusal = self._refusal(peer)
        if buffers or not refusal:
            try:
                job, weights = _decode_submission(buffers)
                refusal = refusal or self._why_not(job)
            except (IndexError, EvenerError) as error:
                refusal = f"the run cannot be understood: {error}"
        if refusal:
            if self._arriving is not None and self._arriving.submission is None:
                self.disconnected(peer)
            self._send(peer, RunRejected(reason=shown(refusal)))
            return None
        now, is_admin = self._clock(), self._arriving is not None and self._arriving.is_admin
        submission = Submission(peer, replace(job, submitter=submitter), weights, now)
        weights_bytes = 0 if weights is None else weights.layout.num_bytes
        until = now + MAX_PAUSE_S
        self._arriving = _Arriving(peer, submitter, is_admin, weights_bytes, until, submission=submission)
        self._ask(peer, self._receiver.request(job.blobs))
        return self._complete()

    def chunk(self, peer: int, chunk: BlobChunk, data: memoryview) -> None:
        """Write a piece of a blob."""
        arriving = self._arriving
        is_of_it = arriving is not None and arriving.peer == peer and arriving.submission is not None
        if arriving is not None and is_of_it and self._receiver.takes(chunk):
            self.arrived(peer, arriving.received + len(data))
            self._fetch(arriving, lambda: self._receiver.receive(chunk, data))

    def tick(self) -> Submission | None:
        """Return the run if its last blob is on the disk by now."""
        arriving = self._arriving
        if arriving is None or not self._receiver.is_syncing:
            return None
        arriving.until = self._clock() + MAX_PAUSE_S
        self._fetch(arriving, self._receiver.tick)
        return self._complete()

    def _fetch(self, arriving: _Arriving, action: Callable[[], Sequence[FetchBlob]]) -> None:
        """Send the next requests; reject a run whose blobs cannot be received."""
        try:
            self._ask(arriving.peer, action())
        except (EvenerError, OSError) as error:
            self.close()
            self._send(arriving.peer, RunRejected(reason=shown(str(error))))

    @property
    def num_bytes(self) -> int:
        """Memory of the weights that are being submitted."""
        return 0 if self._arriving is None else self._arriving.weights_bytes

    def is_of(self, peer: int) -> bool:
        """Return whether a connection is submitting a run."""
        return self._arriving is not None and self._arriving.peer == peer

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone, and the run that it was submitting."""
        if self.is_of(peer):
            self.close()

    def close(self) -> None:
        """Forget an incomplete submission."""
        self._receiver.close()
        self._arriving = None

    def _refusal(self, peer: int) -> str:
        """Say why a connection cannot submit a run now; empty if it can."""
        arriving = self._arriving
        if arriving is None or (arriving.peer == peer and arriving.submission is None):
            return ""
        return f"{arriving.submitter or 'another command'} is submitting a run: try again"

    def _ask(self, peer: int, fetches: Sequence[FetchBlob]) -> None:
        for fetch in fetches:
            self._send(peer, fetch)

    def _complete(self) -> Submission | None:
        submission = self._arriving.submission if self._arriving is not None and self._receiver.is_complete else None
        if submission is not None:
            self.close()
        return submission


def _decode_submission(buffers: Sequence[memoryview]) -> tuple[AnyJob, Flat | None]:
    """Return a job and its initial weights. Raises IndexError, EvenerError: the buffers hold no job."""
    if len(buffers) == 1:
        return decode_rank_job(buffers[0]), None
    job = decode_job(buffers[0])
    return job, Flat(job.layout, as_bytes(buffers[1]))
