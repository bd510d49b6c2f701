"""All messages between master, nodes and commands; arrays and long lists travel beside a message as buffers.

The first message on a connection says who connects: a node joins, a command asks. `PROTOCOL_VERSION` is raised when
old and new versions would misunderstand each other; a new field needs a default. The decoder checks the type of each
field: a message that does not fit is a bad frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from evener.agreements.messages import Answer, Push
from evener.records.error_kind import ErrorKind
from evener.records.profile import DeviceProfile
from evener.records.schema import (
    Count,
    Digest,
    Finite,
    FixedSamples,
    Loss,
    Name,
    Quantity,
    RunName,
    Seconds,
    Text,
    UnitSeconds,
    Word,
)
from evener.wire.frame import Buffer

PROTOCOL_VERSION = 13
MAX_COMPLETE = 8
"""Limit of the complete blobs that a node offers: it has one of data."""
MASTER_ENDED = "the master ends, and its nodes with it"
"""Reason with which a master closes its connections when peers should not reconnect."""


class Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A message's header; its class is its tag."""


class Join(Header, frozen=True, kw_only=True):
    """A node asks to take part, over a new connection.

    Attributes:
        protocol: see above.
        name: name of the node; the master refuses one that is too long.
        incarnation: number of its process, which is higher for a process that is started later.
        evener, python, torch: versions; torch is empty where it is not installed.
        clock: seconds since 1970 on the node.
        device: device that computes there.
        run: run for which its model and data are ready, if any.
        profile: profile of its device, once that is measured.
        key: 32 random bytes, hexadecimal, which only this node knows: a name belongs to the key that first joined with
            it. Empty for a node that accepts any name that belongs to no key.
        is_named: whether its user chose the name; if not, the master may change a name that belongs to another node.
    """

    protocol: Count
    name: Name
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
    """A sign of life, which both sides send several times within the patience.

    Attributes:
        peak_memory_bytes: peak memory of a node's process.
        steps: steps that a node has done since its process started, which tell slow work from none.
    """

    peak_memory_bytes: Quantity = 0
    steps: Count = 0


class Leave(Header, frozen=True, kw_only=True):
    """A node leaves on purpose."""


class Notice(Header, frozen=True, kw_only=True):
    """A node is about to leave: it finishes what it works on, gets nothing new, and is dismissed.

    Attributes:
        seconds: time after which it leaves in any case.
        reason: a clause.
    """

    seconds: Seconds
    reason: Text


class Ready(Header, frozen=True, kw_only=True):
    """A node has model and data of a run and waits for work.

    Attributes:
        run: name of the run.
        unit_seconds: seconds for one sample of a full batch on this node, measured just now.
        fixed_samples: samples that cost as much as the fixed part of a step; 0 if batches are not divided.
    """

    run: RunName
    unit_seconds: UnitSeconds
    fixed_samples: FixedSamples = 0.0


class NotReady(Header, frozen=True, kw_only=True):
    """A node cannot take part in a run: its task's code failed there, or its data are missing.

    Attributes:
        run: name of the run.
        reason: sentence.
        kind: class and fields of the error; None if none was raised.
    """

    run: RunName
    reason: Text
    kind: ErrorKind | None = None


class Contribution(Header, frozen=True, kw_only=True):
    """A worker's result; one buffer: its gradient or its progress.

    Attributes:
        run: name of the run.
        push: header of the contribution.
    """

    run: RunName
    push: Push


class Validated(Header, frozen=True, kw_only=True):
    """The result of a slice of the validation data.

    Attributes:
        run: name of the run.
        number: number of the slice.
        loss: sum over its samples; None if it is not finite.
        correct: number of correct answers.
    """

    run: RunName
    number: Count
    loss: Loss | None
    correct: Annotated[float, Meta(ge=0, le=2**53)]


class FetchBlob(Header, frozen=True, kw_only=True):
    """A request for bytes of a blob, from `offset` on.

    Attributes:
        digest: name of the blob.
        offset: offset of the first byte.
        num_bytes: most bytes to send.
        is_direct: whether the master shall send them itself, because another node did not.
    """

    digest: Digest
    offset: Count
    num_bytes: Annotated[int, Meta(ge=1, le=2**20)] = 2**20
    is_direct: bool = False


class BlobChunk(Header, frozen=True, kw_only=True):
    """Bytes of a blob, in one buffer.

    Attributes:
        digest: name of the blob.
        offset: offset of the first byte.
        total: length of the blob; 0 if it is not available.
    """

    digest: Digest
    offset: Count
    total: Count


class OfferPieces(Header, frozen=True, kw_only=True):
    """A node serves pieces of the blobs of its run to other nodes.

    Attributes:
        address: HOST:PORT at which it listens.
        token: token with which other nodes connect.
        complete: names of the blobs that it has from an earlier run.
    """

    address: Name
    token: Name
    complete: Annotated[tuple[Digest, ...], Meta(max_length=MAX_COMPLETE)] = ()


class FetchFrom(Header, frozen=True, kw_only=True):
    """The master does not send bytes of a blob: a node has them, at the address that it offered."""

    digest: Digest
    offset: Count
    address: Name
    token: Name


class Welcome(Header, frozen=True, kw_only=True):
    """The master accepts a node.

    Attributes:
        patience: seconds of silence after which either side counts as lost.
        remarks: sentences for the node's user about clocks or versions that differ.
        name: name of the node at the master.
    """

    patience: Seconds
    remarks: tuple[Text, ...] = ()
    name: Name = ""


class Dismiss(Header, frozen=True, kw_only=True):
    """The master sends a node away.

    Attributes:
        reason: a clause.
        is_error: whether its process ends with an error.
    """

    reason: Text
    is_error: bool


class GiveNotice(Header, frozen=True, kw_only=True):
    """The master asks a node to give notice, which holds for the next master as well.

    Attributes:
        seconds: time after which it leaves in any case.
        reason: a clause.
    """

    seconds: Seconds
    reason: Text


class Quarantine(Header, frozen=True, kw_only=True):
    """The master pauses a node."""

    seconds: Seconds
    reason: Text


class Prepare(Header, frozen=True, kw_only=True):
    """The master asks a node to prepare for a run; one buffer: the job."""

    run: RunName


class ServerReply(Header, frozen=True, kw_only=True):
    """The server's answer to a worker; one buffer if the answer has contents."""

    run: RunName
    answer: Answer


class ValidationSlice(msgspec.Struct, frozen=True, array_like=True):
    """Samples [first, first + size) of the validation data, as the slice `number` of the run."""

    number: Count
    first: Count
    size: Count


class Validate(Header, frozen=True, kw_only=True):
    """The master asks a node to validate slices of the validation data; one buffer: the weights."""

    run: RunName
    slices: tuple[ValidationSlice, ...]


class Release(Header, frozen=True, kw_only=True):
    """The run is over for a node, which forgets it."""

    run: RunName


class GetStatus(Header, frozen=True, kw_only=True):
    """A command asks for the state of the master."""


class StatusReply(Header, frozen=True, kw_only=True):
    """The state of the master; one buffer: a `ClusterStatus`."""


class ShutDown(Header, frozen=True, kw_only=True):
    """A command ends the master and all its nodes."""


class ExpelNode(Header, frozen=True, kw_only=True):
    """A command expels a node for good."""

    name: Name


class ReleaseNode(Header, frozen=True, kw_only=True):
    """A command lets a node finish what it works on, and go.

    Attributes:
        name: name of the node.
        seconds: time after which it goes in any case.
    """

    name: Name
    seconds: Seconds


class ForgetNode(Header, frozen=True, kw_only=True):
    """A command frees a node's name, and lets the node come back if it was expelled."""

    name: Name


class Invite(Header, frozen=True, kw_only=True):
    """An admin asks for a token for another user.

    Attributes:
        submitter: name of a submitter of runs; empty for a token of nodes.
        nodes: number of nodes that may join with the token.
        seconds: time within which it has to be used first.
    """

    submitter: Word = ""
    nodes: Count = 1
    seconds: Seconds


class Invited(Header, frozen=True, kw_only=True):
    """The new token.

    Attributes:
        invitation: name of the invitation, to revoke it by.
        token: token as text.
    """

    invitation: Word
    token: Text


class RevokeInvitation(Header, frozen=True, kw_only=True):
    """An admin revokes a token; nodes that have joined with it stay."""

    invitation: Word


class SubmitRun(Header, frozen=True, kw_only=True):
    """A command submits a run; buffers: the `Job` and the initial weights, or the `RankJob` alone."""


class WatchRun(Header, frozen=True, kw_only=True):
    """A command that has reconnected to the master asks for the further events of a run."""

    run: RunName


class AssignNodes(Header, frozen=True, kw_only=True):
    """A command assigns other nodes to a run that it submitted with a choice of nodes.

    Attributes:
        run: name of the run.
        nodes: names of all nodes that work for it from now on; none: the run is paused, and loses nothing.
    """

    run: RunName
    nodes: tuple[Name, ...]


class RunAccepted(Header, frozen=True, kw_only=True):
    """The run begins, or has other nodes; its events follow."""

    run: RunName


class RunRejected(Header, frozen=True, kw_only=True):
    """The run does not begin, or does not get the nodes.

    Attributes:
        reason: a sentence.
        run: name of the run; empty if it has none yet.
    """

    reason: Text
    run: RunName = ""


class Refused(Header, frozen=True, kw_only=True):
    """The master refuses a command's request.

    Attributes:
        reason: a sentence.
        is_final: whether the connection ends, because its token does not allow the request.
    """

    reason: Text
    is_final: bool = False


class StopRun(Header, frozen=True, kw_only=True):
    """A command asks to end a run, with its results so far.

    Attributes:
        run: name of the run.
        at_once: whether to end it without the step, validation or checkpoint in progress.
    """

    run: RunName
    at_once: bool = False


class RunEvents(Header, frozen=True, kw_only=True):
    """Events of a run; one buffer: a list of events."""

    run: RunName = ""


class RunFinished(Header, frozen=True, kw_only=True):
    """The run is over; two buffers, its record and its weights, unless it failed before it began.

    Attributes:
        kind: kind of the error that ended it; None if the run was completed.
        reason: the error's sentence.
        run: name of the run.
    """

    kind: ErrorKind | None = None
    reason: Text = ""
    run: RunName = ""


class Send(Protocol):
    """Sends a message to a connection without waiting; does nothing if it is None or gone."""

    def __call__(self, peer: int | None, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame."""
        ...
