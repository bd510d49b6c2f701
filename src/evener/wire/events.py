"""What a hub tells its master, in the order in which it happened."""

from __future__ import annotations

from typing import Generic, TypeAlias

import msgspec

from evener.wire.frame import H


class Opened(msgspec.Struct, frozen=True):
    """A node has proved the secret; from now on it is `peer`, a number that is never used again.

    Attributes:
        peer: number of the connection.
        origin: the address it came from, in words.
    """

    peer: int
    origin: str


class Message(msgspec.Struct, Generic[H], frozen=True):
    """A frame has arrived whole.

    Attributes:
        peer: who sent it.
        header: as it was sent.
        buffers: the memory that `place` gave; empty if the payload was dropped.
    """

    peer: int
    header: H
    buffers: tuple[memoryview, ...]


class Sent(msgspec.Struct, frozen=True):
    """A frame has left: the hub refers to the memory of its buffers no longer.

    Attributes:
        peer: to whom.
        header: of the frame.
    """

    peer: int
    header: msgspec.Struct


class Closed(msgspec.Struct, frozen=True):
    """A connection has ended; frames that were not `Sent` are not, and their memory is referred to no longer.

    Attributes:
        peer: who is gone.
        reason: why, as a clause.
    """

    peer: int
    reason: str


class Refused(msgspec.Struct, frozen=True):
    """Somebody came who did not prove the secret.

    Attributes:
        origin: the address it came from, in words.
        reason: why it was closed, as a clause.
    """

    origin: str
    reason: str


Event: TypeAlias = Opened | Message[H] | Sent | Closed | Refused
