"""Who is here and what goes on: what `evener nodes` shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from evener.profile import DeviceProfile
from evener.ps.ledger import Ledger
from evener.ps.members import Member
from evener.ps.roster import Roster
from evener.ps.run import Run
from evener.schema import Part


class NodeStatus(Part, frozen=True, kw_only=True):
    """One node.

    Attributes:
        name: of the node.
        address: it comes from; empty while it has no connection.
        device: that computes.
        score: GFLOP/s of its float32 matrix products; None before it is measured.
        state: `present`, `away`, `expected`, `benched` or `left`.
        reason: of that state, in words.
        seconds: for which it is still benched, or expected back; None otherwise.
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
    """The run in progress.

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


class ClusterStatus(Part, frozen=True, kw_only=True):
    """Everything."""

    address: str
    nodes: tuple[NodeStatus, ...]
    run: RunStatus | None = None


def node_status(member: Member, roster: Roster, ledger: Ledger | None, now: float) -> NodeStatus:
    """How a node is doing."""
    standing = roster.nodes[member.name]
    until = {"benched": standing.until, "away": roster.deadline(member.name), "expected": roster.deadline(member.name)}
    work = ledger.totals.get(member.name) if ledger else None
    return NodeStatus(
        name=member.name,
        address=member.origin if member.peer is not None else "",
        device=member.device,
        score=_score(member.profile),
        state=standing.state,
        reason=member.reason,
        seconds=max(0.0, until[standing.state] - now) if standing.state in until else None,
        doing=member.doing if standing.state == "present" else "",
        samples=work.samples if work else 0,
        samples_per_second=work.samples / work.seconds if work and work.seconds else 0.0,
        bytes_sent=work.sent if work else 0,
        bytes_received=work.received if work else 0,
    )


def node_statuses(
    members: Mapping[str, Member], roster: Roster, ledger: Ledger | None, now: float
) -> tuple[NodeStatus, ...]:
    """How all nodes are doing, by name; also those that have only been heard of before the master was restarted."""
    absent = {name: Member(name, 0, None, "", "") for name in roster.nodes if name not in members}
    known = {**absent, **members}
    return tuple(node_status(known[name], roster, ledger, now) for name in sorted(known) if name in roster.nodes)


def run_status(run: Run, folder: Path) -> RunStatus:
    """How a run is doing, whose result will lie in `folder`."""
    validations = run.ledger.validations
    return RunStatus(
        run=run.job.run,
        task=run.job.title,
        protocol=run.job.protocol,
        version=run.server.version,
        epoch=run.ledger.epoch,
        epochs=run.job.workload.num_epochs,
        loss=run.ledger.loss,
        accuracy=validations[-1].accuracy if validations else None,
        folder=str(folder),
    )


def encode_status(situation: ClusterStatus) -> bytes:
    """As JSON."""
    return msgspec.json.encode(situation)


def decode_status(data: bytes | memoryview) -> ClusterStatus:
    """From JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=ClusterStatus)


def _score(profile: DeviceProfile | None) -> float | None:
    flops = [one.matmul_flops for one in profile.throughputs if one.precision == "fp32"] if profile else []
    return flops[0] / 1e9 if flops and flops[0] else None
