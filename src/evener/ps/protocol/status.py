"""Who is here and what goes on: what `evener nodes` shows."""

from __future__ import annotations

import msgspec

from evener.records.schema import Part, decode_printable


class NodeStatus(Part, frozen=True, kw_only=True):
    """One node.

    Attributes:
        name: of the node.
        address: it comes from; empty while it has no connection.
        device: that computes.
        score: GFLOP/s of its float32 matrix products; None before it is measured.
        state: `present`, `away`, `expected`, `excluded` or `left`.
        reason: of that state, in words.
        seconds: for which it is still excluded, or expected back; None otherwise.
        doing: in words.
        samples: that it has computed in this run.
        samples_per_second: while it computes.
        bytes_sent: contributions to this run.
        bytes_received: weights of this run.
    """

    name: str
    address: str
    device: str
    score: float | None
    state: str
    reason: str
    seconds: float | None
    doing: str
    samples: int
    samples_per_second: float
    bytes_sent: int
    bytes_received: int


class RunStatus(Part, frozen=True, kw_only=True):
    """A run in progress.

    Attributes:
        run: its name.
        task: of what.
        protocol: of agreement.
        version: updates made.
        epoch: of the last one.
        epochs: asked for; None if the updates are counted.
        loss: of the last update.
        accuracy: of the last validation.
        folder: where its result will lie, on the master's machine.
        submitter: who asked for it.
        nodes: that work for it; None: all.
        checkpoint: step of that which the master keeps, to go on from if all nodes are lost; 0 for none.
    """

    run: str
    task: str
    protocol: str
    version: int
    epoch: int
    epochs: int | None
    loss: float
    accuracy: float | None
    folder: str
    submitter: str = ""
    nodes: tuple[str, ...] | None = None
    checkpoint: int = 0


class InvitationStatus(Part, frozen=True, kw_only=True):
    """One invitation.

    Attributes:
        name: by which it can be revoked.
        submitter: name of who may submit runs with it; empty: nodes may join with it.
        nodes: that may join with it.
        joined: nodes that have.
        seconds: for which it can be used for the first time; 0 if it cannot any more.
    """

    name: str
    submitter: str
    nodes: int
    joined: int
    seconds: float


class ClusterStatus(Part, frozen=True, kw_only=True):
    """Everything."""

    address: str
    nodes: tuple[NodeStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    invitations: tuple[InvitationStatus, ...] = ()

    @property
    def run(self) -> RunStatus | None:
        """The run in progress that began first, if there is one."""
        return self.runs[0] if self.runs else None


def encode_status(situation: ClusterStatus) -> bytes:
    """As JSON."""
    return msgspec.json.encode(situation)


def decode_status(data: bytes | memoryview) -> ClusterStatus:
    """From JSON, its texts printable. Raises msgspec.DecodeError."""
    return decode_printable(data, ClusterStatus)
