"""What a server tells whoever polls it: who came, what arrived, who failed, who has gone."""

from __future__ import annotations

from typing import Generic, TypeAlias

import msgspec

from evener.wire.frame import H
from evener.wire.identity import Grant


class PeerConnected(msgspec.Struct, frozen=True):
    """Somebody at address `origin` has proved a secret; from now on it is `peer`, a number that is never used again.

    Its token allows what `grant` says.
    """

    peer: int
    origin: str
    grant: Grant = Grant()


class FrameReceived(msgspec.Struct, Generic[H], frozen=True):
    """A frame has arrived whole.

    Attributes:
        peer: who sent it.
        header: as it was sent.
        buffers: the memory that `place` gave; empty if the payload was dropped.
    """

    peer: int
    header: H
    buffers: tuple[memoryview, ...]


class PeerDisconnected(msgspec.Struct, frozen=True):
    """A connection has ended, for `reason`; the memory of frames that waited for it is referred to no longer."""

    peer: int
    reason: str


class PeerFailed(msgspec.Struct, frozen=True):
    """What a peer sent could not be dealt with, because of `error`; its connection is closed, nothing else happens.

    A `BadFrame` is the peer's fault; anything else, lack of memory included, arose while its frame was dealt with.
    """

    peer: int
    error: Exception


class PeerRefused(msgspec.Struct, frozen=True):
    """Somebody at address `origin` did not prove the secret, or came when it was full; `reason` is a clause."""

    origin: str
    reason: str


ServerEvent: TypeAlias = PeerConnected | FrameReceived[H] | PeerFailed | PeerDisconnected | PeerRefused
