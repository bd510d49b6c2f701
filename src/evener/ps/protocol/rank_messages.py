"""Messages of a run whose ranks work together, one process per node.

command          master                                   node
  -- SubmitRun -->
                   -- PrepareRank ------------------------> fetches the code
                   <------------------------- RankReady --  (over every new connection again)
                   -- StartRank --------------------------> starts a process
                   <- RankSaid, RankTold ----------------->  between the process and the coordinator, the master
  <- RunEvents --  <------------------------- RankShown --
                   -- StopRank --------------------------->
                   <------------------------- RankSaved --  a checkpoint, which the master fetches: FetchBlob, RankPiece
                   <------------------------- RankEnded --  with the weights, if it has written them
  <- RunFinished   -- Release ----------------------------> the run is over
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from evener.ps.protocol.messages import Header
from evener.records.decoding import decode_msgpack
from evener.records.error_kind import ErrorKind
from evener.records.errors import InvalidFile, require
from evener.records.schema import NOT_DECODED, Count, Digest, Name, Part, Quantity, RunName, Seconds, Text, Word

MAX_MESSAGE_BYTES = 2**20
"""Limit of one message between a process and the coordinator, in bytes."""
MAX_SHOWN_BYTES = 2**24
"""Limit of the events that a process shows at a time, in bytes."""
MAX_RANK_JOB_BYTES = 2**20


Speed = Annotated[float, Meta(ge=1e-6, le=1)]
"""Speed of a node as a fraction, by which times are divided."""


class RankJob(Part, frozen=True, kw_only=True):
    """A run whose ranks work together.

    Attributes:
        run: name of the run and of its folder.
        task: name of a built-in task, or of a file in the blob `code`.
        title: name of the task, for people.
        code, data: blobs; empty where none travels.
        checkpoint: blob of the checkpoint to continue from; empty for none.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        config: options of the run, as the ranks read them.
        reads_early: whether nodes begin before all data have come.
        brings_program: whether the file defines `rank_program`, which a rank runs instead of a task.
        submitter: name of the submitter at the master.
        nodes: names of the nodes that work for the run at present; none of them: the run is paused. None: all nodes
            work for it, and no other run may begin.
    """

    run: RunName
    task: Name
    title: Name
    code: Digest = ""
    data: Digest = ""
    checkpoint: Digest = ""
    data_dir: Text = ""
    config: bytes
    reads_early: bool = False
    brings_program: bool = False
    submitter: Word = ""
    nodes: tuple[Name, ...] | None = None

    def __post_init__(self) -> None:
        require(bool(self.run), "run", self.run, "a name")

    @property
    def blobs(self) -> tuple[str, ...]:
        """Blobs that a node needs before it can begin."""
        return tuple(digest for digest in (self.code, self.data, self.checkpoint) if digest)

    @property
    def rests(self) -> bool:
        """Whether the run is paused: no node works for it."""
        return self.nodes == ()

    def takes(self, node: str) -> bool:
        """Return whether a node of this name works for the run."""
        return self.nodes is None or node in self.nodes


class RankNode(Part, frozen=True, kw_only=True):
    """A node, as the ranks know it.

    Attributes:
        name: name of the node.
        host: its machine: nodes of one share its memory.
        device: device that computes.
        speed: 1, or the fraction to which it is throttled.
    """

    name: Name
    host: Name
    device: Word
    speed: Speed


class RankPlace(Part, frozen=True, kw_only=True):
    """The parameters of a rank's process.

    Attributes:
        rank: rank of the process at the start.
        nodes: initial nodes of the run; the node's own alone if it joins later.
        secret: secret that all ranks share.
        patience: seconds of silence after which a rank counts as lost.
        is_late: whether the run has begun without it.
        leaving: nodes of the run that are about to leave.
    """

    rank: Count
    nodes: tuple[RankNode, ...]
    secret: Annotated[bytes, Meta(max_length=64)]
    patience: Seconds
    is_late: bool
    leaving: tuple[Name, ...] = ()


class PrepareRank(Header, frozen=True, kw_only=True):
    """The master asks a node to prepare for a run; one buffer: the `RankJob`."""

    run: RunName


class RankReady(Header, frozen=True, kw_only=True):
    """A node has the code of a run.

    Attributes:
        run: name of the run.
        process: number of the process that runs there; 0 for none.
        speed: 1, or the fraction to which the node is throttled.
    """

    run: RunName
    process: Count = 0
    speed: Speed


class StartRank(Header, frozen=True, kw_only=True):
    """The master asks a node to start a process of this number; one buffer: its `RankPlace`."""

    run: RunName
    process: Count


class StopRank(Header, frozen=True, kw_only=True):
    """The master asks a node to end a process after its step, or at once."""

    run: RunName
    process: Count
    at_once: bool = False


class RankSaid(Header, frozen=True, kw_only=True):
    """A message of a process to the coordinator; one buffer: a `membership.shared_values.FromRank`."""

    run: RunName
    process: Count


class RankTold(Header, frozen=True, kw_only=True):
    """A message of the coordinator to a process; one buffer: a `membership.shared_values.ToRank`."""

    run: RunName
    process: Count


class RankShown(Header, frozen=True, kw_only=True):
    """Events of a process; one buffer: a list of events."""

    run: RunName
    process: Count


class RankSaved(Header, frozen=True, kw_only=True):
    """A process has written a checkpoint, which its node sends on a `FetchBlob`.

    Attributes:
        run, process: name of the run and number of the process.
        step: step after which it was written.
        digest: digest of the blob.
    """

    run: RunName
    process: Count
    step: Quantity
    digest: Digest


class RankPiece(Header, frozen=True, kw_only=True):
    """Bytes of the blob of a checkpoint, in one buffer; see `BlobChunk`."""

    run: RunName
    digest: Digest
    offset: Count
    total: Count


class RankEnded(Header, frozen=True, kw_only=True):
    """A process has ended; one buffer, the weights, if it has written them.

    Attributes:
        run, process: name of the run and number of the process.
        has_finished: whether its work is done.
        kind: kind of its error; None if it reported none.
        is_own: whether the error arose in this process, not from the loss of another one.
        sentence: sentence of the error.
        ending: clause that says how the process ended.
    """

    run: RunName
    process: Count
    has_finished: bool
    kind: ErrorKind | None = None
    is_own: bool = False
    sentence: Text = ""
    ending: Text = ""


def encode_rank_part(value: RankJob | RankPlace) -> bytes:
    """Encode a buffer."""
    return msgspec.msgpack.encode(value)


def decode_rank_job(data: bytes | memoryview) -> RankJob:
    """Decode the job in a buffer. Raises InvalidFile: it is not a job."""
    try:
        return decode_msgpack(data, RankJob)
    except NOT_DECODED as error:
        raise InvalidFile(f"this is not a job of ranks: {error}") from error


def decode_rank_place(data: bytes | memoryview) -> RankPlace:
    """Decode the `RankPlace` in a buffer. Raises msgspec.DecodeError."""
    return decode_msgpack(data, RankPlace)
