"""What a master, its nodes and commands tell each other of a run whose ranks work together: one process a node.

command          master                                   node
  -- SubmitRun -->
                   -- PrepareRank ------------------------> fetches the code
                   <------------------------- RankReady --  (over every new connection again)
                   -- StartRank --------------------------> starts a process
                   <- RankSaid, RankTold ----------------->  between it and the authority, which the master is
  <- RunEvents --  <------------------------- RankShown --
                   -- StopRank, EndRank ------------------>
                   <------------------------- RankSaved --  a checkpoint, which the master fetches: FetchBlob, RankPiece
                   <------------------------- RankEnded --  with the weights, if it has written them
  <- RunFinished   -- Release ----------------------------> all of it is over
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from evener.ps.protocol.messages import Header
from evener.records.error_kind import ErrorKind
from evener.records.errors import InvalidFile, require
from evener.records.schema import NOT_DECODED, Count, Digest, Name, Part, RunName, Seconds, Text, Word

MOST_WORDS = 2**20
"""Bytes that a process and the authority say to each other at a time."""
MOST_SHOWN = 2**24
"""Bytes of events that a process shows at a time."""
MOST_RANK_JOB = 2**20


Speed = Annotated[float, Meta(gt=0, le=1)]


class RankJob(Part, frozen=True, kw_only=True):
    """What the ranks have to do.

    Attributes:
        run: its name, also that of its folder.
        task: name of a built-in task, or of a file in the blob `code`.
        title: name of the task, for people.
        code, data: blobs; empty where none travels.
        checkpoint: blob of the one to go on from, likewise.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        config: what was asked for, as the ranks read it.
        brings_program: whether the file defines `rank_program`, which is what a rank runs, instead of a task.
        submitter: who asked for it, as the master knows him.
    """

    run: RunName
    task: Name
    title: Name
    code: Digest = ""
    data: Digest = ""
    checkpoint: Digest = ""
    data_dir: Text = ""
    config: bytes
    brings_program: bool = False
    submitter: Word = ""

    def __post_init__(self) -> None:
        require(bool(self.run), "run", self.run, "a name")

    @property
    def blobs(self) -> tuple[str, ...]:
        """What a node has to have before it can begin."""
        return tuple(digest for digest in (self.code, self.data, self.checkpoint) if digest)

    @property
    def rests(self) -> bool:
        """Whether no node works for the run at present."""
        return False

    def takes(self, _: str) -> bool:
        """Whether a node of this name works for the run: every node does."""
        return True


class RankNode(Part, frozen=True, kw_only=True):
    """A node, as the ranks know it.

    Attributes:
        name: of the node.
        host: its machine: nodes of one share its memory.
        device: that computes.
        speed: 1, or the fraction to which it is slowed down.
    """

    name: Name
    host: Name
    device: Word
    speed: Speed


class RankPlace(Part, frozen=True, kw_only=True):
    """A process's place among the ranks.

    Attributes:
        rank: of the process at the start.
        nodes: that the run began on; of one that comes later, its own alone.
        secret: that all of them share.
        patience: seconds of silence that are borne.
        is_late: whether the run has begun without it.
    """

    rank: Count
    nodes: tuple[RankNode, ...]
    secret: Annotated[bytes, Meta(max_length=64)]
    patience: Seconds
    is_late: bool


class PrepareRank(Header, frozen=True, kw_only=True):
    """Make ready for a run; one buffer: the `RankJob`."""

    run: RunName


class RankReady(Header, frozen=True, kw_only=True):
    """A node has the code of a run.

    Attributes:
        run: for which.
        process: number of the one that runs there; 0 for none.
        speed: 1, or the fraction to which the node is slowed down.
    """

    run: RunName
    process: Count = 0
    speed: Speed


class StartRank(Header, frozen=True, kw_only=True):
    """Start a process of this number; one buffer: its `RankPlace`."""

    run: RunName
    process: Count


class StopRank(Header, frozen=True, kw_only=True):
    """Have a process end after its step; or at once."""

    run: RunName
    process: Count
    at_once: bool = False


class RankSaid(Header, frozen=True, kw_only=True):
    """A process says something to the authority: one buffer, an `elastic.shared_values.FromRank`."""

    run: RunName
    process: Count


class RankTold(Header, frozen=True, kw_only=True):
    """The authority says something to a process: one buffer, an `elastic.shared_values.ToRank`."""

    run: RunName
    process: Count


class RankShown(Header, frozen=True, kw_only=True):
    """What happened, as a process tells it: one buffer, a list of events."""

    run: RunName
    process: Count


class RankSaved(Header, frozen=True, kw_only=True):
    """A process has written a checkpoint, which its node gives to who asks for it by `FetchBlob`.

    Attributes:
        run, process: whose it is.
        step: after which.
        digest: of the blob.
    """

    run: RunName
    process: Count
    step: Count
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
        run, process: which one.
        has_finished: whether its work is done.
        kind: of its error; None if it did not say any.
        is_own: whether that arose there; else another process was gone.
        sentence: of the error.
        ending: how the process ended, in words.
    """

    run: RunName
    process: Count
    has_finished: bool
    kind: ErrorKind | None = None
    is_own: bool = False
    sentence: Text = ""
    ending: Text = ""


def encode_rank_part(value: RankJob | RankPlace) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(value)


def decode_rank_job(data: bytes | memoryview) -> RankJob:
    """The job in a buffer. Raises InvalidFile: it is none."""
    try:
        return msgspec.msgpack.decode(data, type=RankJob)
    except NOT_DECODED as error:
        raise InvalidFile(f"this is no job of ranks: {error}") from error


def decode_rank_place(data: bytes | memoryview) -> RankPlace:
    """The place in a buffer. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=RankPlace)
