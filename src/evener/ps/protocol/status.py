"""The state of a master, as `evener nodes` shows it."""

from __future__ import annotations

import msgspec

from evener.records.schema import Part, decode_printable


class NodeStatus(Part, frozen=True, kw_only=True):
    """The state of one node.

    Attributes:
        name: name of the node.
        address: address that it connects from; empty while it has no connection.
        device: device that computes.
        score: GFLOP/s of its float32 matrix products; None before it is measured.
        state: `present`, `away`, `expected`, `excluded` or `left`.
        reason: reason of that state, a clause.
        seconds: remaining seconds of an exclusion, or of the wait for its return; None otherwise.
        doing: activity, a clause.
        samples: samples that it has computed in this run.
        samples_per_second: speed while it computes.
        bytes_sent: bytes of its contributions to this run.
        bytes_received: bytes of weights of this run.
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
    """The state of a run in progress.

    Attributes:
        run: name of the run.
        task: name of the task.
        method: name of the agreement, or "strategy" and the strategy of ranks.
        version: number of updates.
        epoch: epoch of the last update.
        epochs: number of epochs; None if the run ends after a number of updates.
        loss: loss of the last update.
        accuracy: accuracy of the last validation.
        folder: folder of its result, on the master's machine.
        submitter: name of the submitter.
        nodes: nodes that work for it; None: all.
        checkpoint: step of the master's last checkpoint, to continue from if all nodes are lost; 0 for none.
    """

    run: str
    task: str
    method: str
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
    """The state of one invitation.

    Attributes:
        name: name of the invitation, to revoke it by.
        submitter: name of a submitter of runs; empty if nodes may join with it.
        nodes: number of nodes that may join with it.
        joined: number of nodes that have joined with it.
        seconds: remaining time within which it can be used first; 0 if it is over.
    """

    name: str
    submitter: str
    nodes: int
    joined: int
    seconds: float


class ClusterStatus(Part, frozen=True, kw_only=True):
    """The state of a master, its nodes and runs."""

    address: str
    nodes: tuple[NodeStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    invitations: tuple[InvitationStatus, ...] = ()

    @property
    def run(self) -> RunStatus | None:
        """The run in progress that began first, if there is one."""
        return self.runs[0] if self.runs else None


def encode_status(situation: ClusterStatus) -> bytes:
    """Encode a status as JSON."""
    return msgspec.json.encode(situation)


def decode_status(data: bytes | memoryview) -> ClusterStatus:
    """Decode a status, its texts printable. Raises msgspec.DecodeError."""
    return decode_printable(data, ClusterStatus)
