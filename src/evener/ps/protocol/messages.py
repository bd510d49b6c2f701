"""Everything that master, nodes and commands tell each other; arrays and long lists travel beside it as buffers.

Who speaks first says who it is: a node joins, a command asks. `PROTOCOL` grows when old and new would misunderstand
each other; a field that is added gets a default. What a field may be, its type says, and the decoder checks it: a
message with anything else in it is a bad frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from evener.records.error_kind import ErrorKind
from evener.records.profile import DeviceProfile
from evener.records.schema import Count, Digest, Finite, Loss, Name, RunName, Seconds, Text, UnitSeconds, Word
from evener.sync.messages import Answer, Push
from evener.wire.frame import Buffer

PROTOCOL = 5
MASTER_ENDED = "the master ends, and its nodes with it"
"""Why a master closes its connections when nobody is to look for it any more."""


class Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A message's header; its class is its tag."""


class Join(Header, frozen=True, kw_only=True):
    """A node, over a new connection, wants to take part.

    Attributes:
        protocol: see above.
        name: of the node; the answer to one that may not be says why.
        incarnation: of its process: one that is started later has a higher number.
        evener, python, torch: versions; torch is empty where it is not installed.
        clock: seconds since 1970 on the node.
        device: that computes there.
        run: for which it has model and data ready, if any.
        profile: of its device, once that is measured.
        key: 32 random bytes, hexadecimal, that nobody else has: a name belongs to the key that first joined with it.
            Empty for a node that is content with a name that nobody owns.
        is_named: whether its user chose the name; else, if it belongs to another one, it is called otherwise.
    """

    protocol: Count
    name: Annotated[str, Meta(max_length=256)]
    incarnation: Count
    evener: Word
    python: Word
    torch: Word
    clock: Finite
    device: Word
    run: RunName = ""
    profile: DeviceProfile | None = None
    key: Digest = ""
    is_named: bool = True


class Profiled(Header, frozen=True, kw_only=True):
    """A node has measured its device and can work from now on."""

    profile: DeviceProfile


class Heartbeat(Header, frozen=True, kw_only=True):
    """I live. Both sides say so several times within the patience.

    Attributes:
        peak_memory_bytes: of a node's process.
        steps: that a node has done since its process started, so that slow work can be told from none.
    """

    peak_memory_bytes: Count = 0
    steps: Count = 0


class Leave(Header, frozen=True, kw_only=True):
    """A node goes, on purpose."""


class Ready(Header, frozen=True, kw_only=True):
    """A node has model and data of a run and waits for work.

    Attributes:
        run: for which.
        unit_seconds: that one of its samples takes there, measured just now.
    """

    run: RunName
    unit_seconds: UnitSeconds


class NotReady(Header, frozen=True, kw_only=True):
    """A node cannot take part in a run: its task's code failed there, or its data are not there."""

    run: RunName
    reason: Text


class Contribution(Header, frozen=True, kw_only=True):
    """What a worker did; one buffer: its gradient or how far it went.

    Attributes:
        run: to which it belongs.
        push: of the worker.
    """

    run: RunName
    push: Push


class Validated(Header, frozen=True, kw_only=True):
    """What a slice of the validation data gave.

    Attributes:
        run: to which it belongs.
        number: of the slice.
        loss: sum over its samples; None if it is not finite.
        correct: how many were right.
    """

    run: RunName
    number: Count
    loss: Loss | None
    correct: Annotated[float, Meta(ge=0, le=2**53)]


class FetchBlob(Header, frozen=True, kw_only=True):
    """Send me bytes of a blob, from `offset` on."""

    digest: Digest
    offset: Count


class BlobChunk(Header, frozen=True, kw_only=True):
    """Bytes of a blob, in one buffer.

    Attributes:
        digest: name of the blob.
        offset: of the first byte.
        total: bytes of the blob; 0 if it is not to be had.
    """

    digest: Digest
    offset: Count
    total: Count


class Welcome(Header, frozen=True, kw_only=True):
    """The node is in.

    Attributes:
        patience: seconds of silence after which either side gives the other up.
        remarks: sentences for the node's user: clocks or versions that differ.
        name: that it is called by.
    """

    patience: Seconds
    remarks: tuple[Text, ...] = ()
    name: Name = ""


class Dismiss(Header, frozen=True, kw_only=True):
    """The node is to go.

    Attributes:
        reason: a clause.
        is_error: whether its process ends as one that failed.
    """

    reason: Text
    is_error: bool


class Quarantine(Header, frozen=True, kw_only=True):
    """The node gets nothing to do for a while."""

    seconds: Seconds
    reason: Text


class Prepare(Header, frozen=True, kw_only=True):
    """Make ready for a run; one buffer: the job."""

    run: RunName


class ServerReply(Header, frozen=True, kw_only=True):
    """What the server says to a worker; one buffer if the answer has contents."""

    run: RunName
    answer: Answer


class Validate(Header, frozen=True, kw_only=True):
    """Validate samples [first, first + size); one buffer: the weights."""

    run: RunName
    number: Count
    first: Count
    size: Count


class Release(Header, frozen=True, kw_only=True):
    """The run is over; forget it."""

    run: RunName


class GetStatus(Header, frozen=True, kw_only=True):
    """A command wants to know who is here and what goes on."""


class StatusReply(Header, frozen=True, kw_only=True):
    """One buffer: a `ClusterStatus`."""


class ShutDown(Header, frozen=True, kw_only=True):
    """A command ends the master and all its nodes."""


class ExpelNode(Header, frozen=True, kw_only=True):
    """A command sends a node away for good."""

    name: Name


class ForgetNode(Header, frozen=True, kw_only=True):
    """A command frees a node's name, and lets it come back if it was expelled."""

    name: Name


class SubmitRun(Header, frozen=True, kw_only=True):
    """A command submits a run; buffers: the `Job` and the weights to begin with, or the `RankJob` alone."""


class WatchRun(Header, frozen=True, kw_only=True):
    """A command, which has lost the master and found it again, wants to hear the rest of a run."""

    run: RunName


class AssignNodes(Header, frozen=True, kw_only=True):
    """A command wants other nodes to work for a run that it submitted with a choice of nodes.

    Attributes:
        run: its name.
        nodes: names of all that work for it from now on; nobody: the run rests, and loses nothing.
    """

    run: RunName
    nodes: tuple[Name, ...]


class RunAccepted(Header, frozen=True, kw_only=True):
    """The run begins, or has other nodes; news of it follow."""

    run: RunName


class RunRejected(Header, frozen=True, kw_only=True):
    """The run does not begin, or does not get the nodes.

    Attributes:
        reason: a sentence.
        run: its name; empty if it has none yet.
    """

    reason: Text
    run: RunName = ""


class Refused(Header, frozen=True, kw_only=True):
    """What a command asked for is not done.

    Attributes:
        reason: a sentence.
        is_final: whether the connection ends, as its token does not allow what was asked.
    """

    reason: Text
    is_final: bool = False


class StopRun(Header, frozen=True, kw_only=True):
    """A command wants the run to end now, with what it has reached."""

    run: RunName


class RunEvents(Header, frozen=True, kw_only=True):
    """What happened in a run; one buffer: a list of events."""

    run: RunName = ""


class RunFinished(Header, frozen=True, kw_only=True):
    """The run is over; two buffers, its record and its weights, unless it failed before it began.

    Attributes:
        kind: of the error that ended it; None if the run was completed.
        reason: the error's sentence.
        run: its name.
    """

    kind: ErrorKind | None = None
    reason: Text = ""
    run: RunName = ""


class Send(Protocol):
    """Sends a message to a connection without waiting; to nobody if it is None, or gone."""

    def __call__(self, peer: int | None, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame."""
        ...
