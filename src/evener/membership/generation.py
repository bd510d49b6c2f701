"""Generations of an elastic run, and the messages between its coordinator and its processes.

    process -> coordinator    Hello         the process can take part
                              ReachedPeers  a joining process reaches these processes
                              Beat          the process is alive
    coordinator -> process    Probe         the processes that a joining one has to reach before they wait for it
                              Generation    the new participants, perhaps without the receiver
                              Heard         the answer to a Beat: the process was not lost before it

Every process of a run has a unique number: a node that was lost returns as another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from evener.records.decoding import msgpack_decoder
from evener.records.schema import Amount, Name, Part


class Participant(Part, frozen=True, kw_only=True):
    """A process in a generation.

    Attributes:
        process: number of the process.
        node: of the process.
        since: number of its first generation.
    """

    process: Amount
    node: Name
    since: Amount


class Generation(Part, frozen=True, kw_only=True, tag=True):
    """The ranks that train together, until the next generation; only the coordinator creates one.

    Attributes:
        number: counts from 1.
        participants: in order of ranks, which is the order of joining.
        reason: cause of the generation, for the user.
        is_urgent: whether a rank is lost, so that no step can finish; otherwise it begins after a step.
        lost: nodes lost since the previous generation.
        joined: nodes that joined.
        left: nodes that left on notice, after a whole step.
    """

    number: Amount
    participants: tuple[Participant, ...]
    reason: str
    is_urgent: bool
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[str]:
        """The nodes in order of ranks."""
        return [one.node for one in self.participants]

    def rank_of(self, process: int) -> int | None:
        """Return the rank of the process; None if it takes no part."""
        ranks = [rank for rank, one in enumerate(self.participants) if one.process == process]
        return ranks[0] if ranks else None


def as_one(generations: Sequence[Generation]) -> Generation:
    """Merge consecutive generations into the last one; the earlier ones never computed."""
    return replace(
        generations[-1],
        reason=", ".join(one.reason for one in generations),
        is_urgent=any(one.is_urgent for one in generations),
        lost=tuple(node for one in generations for node in one.lost),
        joined=tuple(node for one in generations for node in one.joined),
        left=tuple(node for one in generations for node in one.left),
    )


class Hello(Part, frozen=True, kw_only=True, tag=True):
    """A report that a process can take part.

    Attributes:
        node: of the process.
        initial_nodes: nodes of the first generation; empty for a process that joins later.
    """

    node: Name
    initial_nodes: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()


class Beat(Part, frozen=True, kw_only=True, tag=True):
    """A heartbeat of a process.

    Attributes:
        count: increases with every beat.
        step: current step of the process.
        holds: number of the last generation in which it held the state of the training; 0 if it never did.
    """

    count: Amount
    step: Amount
    holds: Amount


class Probe(Part, frozen=True, kw_only=True, tag=True):
    """A request to a joining process: reach these processes. `nodes` has the node of each by its number."""

    nodes: dict[Amount, Name]


class ReachedPeers(Part, frozen=True, kw_only=True, tag=True):
    """A report of a joining process: it reaches the processes of these numbers."""

    processes: Annotated[tuple[Amount, ...], Meta(max_length=1024)]


class Heard(Part, frozen=True, kw_only=True, tag=True):
    """The answer to the Beat of this `count`."""

    count: Amount


ToCoordinator: TypeAlias = Hello | ReachedPeers | Beat
ToProcess: TypeAlias = Probe | Generation | Heard

_to_coordinator = msgpack_decoder(ToCoordinator)
_to_process = msgpack_decoder(ToProcess)


def encode_message(message: ToCoordinator | ToProcess) -> bytes:
    """Encode `message` for sending."""
    return msgspec.msgpack.encode(message)


def decode_for_coordinator(data: bytes) -> ToCoordinator:
    """Decode a message of a process. Raises msgspec.DecodeError."""
    message: ToCoordinator = _to_coordinator.decode(data)
    return message


def decode_for_process(data: bytes) -> ToProcess:
    """Decode a message of the coordinator. Raises msgspec.DecodeError."""
    message: ToProcess = _to_process.decode(data)
    return message
