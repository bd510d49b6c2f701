"""What the authority and the processes of an elastic run tell each other, and the generation: who trains together now.

    process -> authority    Hello       it can take part, and is told when it does
                            Beat        it lives
    authority -> process    Generation  who takes part from now on, itself perhaps no more
                            Heard       the answer to a Beat: until then at least it was not given up

A process has a number that no other one of the run ever has: one that was given up comes back as another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from evener.records.schema import Amount, Name, Part


class Participant(Part, frozen=True, kw_only=True):
    """A process that takes part.

    Attributes:
        process: its number.
        node: that it computes on.
        since: number of the first generation that it is in.
    """

    process: Amount
    node: Name
    since: Amount


class Generation(Part, frozen=True, kw_only=True, tag=True):
    """Who takes part; the authority alone makes one, and its participants stay until the next.

    Attributes:
        number: from 1, each larger by one than the one before.
        participants: in order of their ranks, those that came first before others.
        reason: why it began, in words.
        is_urgent: whether somebody is gone, so that no step can be finished; else it begins after a step.
        lost: nodes that are gone since the one before.
        joined: nodes that came.
    """

    number: Amount
    participants: tuple[Participant, ...]
    reason: str
    is_urgent: bool
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[str]:
        """In order of ranks."""
        return [one.node for one in self.participants]

    def rank_of(self, process: int) -> int | None:
        """Of the process; None: it takes no part."""
        ranks = [rank for rank, one in enumerate(self.participants) if one.process == process]
        return ranks[0] if ranks else None


def as_one(generations: Sequence[Generation]) -> Generation:
    """The last of some that follow each other, with what happened in all of them; nobody computed in those before."""
    return replace(
        generations[-1],
        reason=", ".join(one.reason for one in generations),
        is_urgent=any(one.is_urgent for one in generations),
        lost=tuple(node for one in generations for node in one.lost),
        joined=tuple(node for one in generations for node in one.joined),
    )


class Hello(Part, frozen=True, kw_only=True, tag=True):
    """A process can take part.

    Attributes:
        node: that it computes on.
        founders: nodes that are to be in the first generation; empty for one that comes later.
    """

    node: Name
    founders: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()


class Beat(Part, frozen=True, kw_only=True, tag=True):
    """A process lives.

    Attributes:
        count: grows with every one.
        step: that it works on.
        holds: number of the last generation in which it had, or was given, the state of the training; 0: none yet.
    """

    count: Amount
    step: Amount
    holds: Amount


class Heard(Part, frozen=True, kw_only=True, tag=True):
    """The answer to the Beat of this `count`."""

    count: Amount


ToAuthority: TypeAlias = Hello | Beat
ToProcess: TypeAlias = Generation | Heard

_to_authority = msgspec.msgpack.Decoder(ToAuthority)
_to_process = msgspec.msgpack.Decoder(ToProcess)


def encode_message(message: ToAuthority | ToProcess) -> bytes:
    """`message` as it travels."""
    return msgspec.msgpack.encode(message)


def decode_for_authority(data: bytes) -> ToAuthority:
    """What a process said. Raises msgspec.DecodeError."""
    message: ToAuthority = _to_authority.decode(data)
    return message


def decode_for_process(data: bytes) -> ToProcess:
    """What the authority said. Raises msgspec.DecodeError."""
    message: ToProcess = _to_process.decode(data)
    return message
