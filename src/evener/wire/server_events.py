"""Events of a server: peers that connected, frames that arrived, and peers that failed or disconnected."""

from __future__ import annotations

from typing import Generic, TypeAlias

import msgspec

from evener.wire.frame import H
from evener.wire.identity import Grant


class PeerConnected(msgspec.Struct, frozen=True):
    """A peer at address `origin` has proved a secret.

    It gets the number `peer`, which is never reused. `grant` is what its token allows.
    """

    peer: int
    origin: str
    grant: Grant = Grant()


class FrameReceived(msgspec.Struct, Generic[H], frozen=True):
    """A frame has arrived completely.

    Attributes:
        peer: The sender.
        header: The header, as it was sent.
        buffers: The memory that `place` returned; empty if the payload was dropped.
    """

    peer: int
    header: H
    buffers: tuple[memoryview, ...]


class PeerDisconnected(msgspec.Struct, frozen=True):
    """A connection has ended, for `reason`; the memory of queued frames is free again."""

    peer: int
    reason: str


class PeerFailed(msgspec.Struct, frozen=True):
    """Handling a peer's data raised `error`; only its connection is closed.

    A `BadFrame` is the peer's fault; any other error, such as lack of memory, arose while its frame was handled.
    """

    peer: int
    error: Exception


class PeerRefused(msgspec.Struct, frozen=True):
    """A peer at `origin` did not prove the secret, or found the server full; `reason` is a clause."""

    origin: str
    reason: str


ServerEvent: TypeAlias = PeerConnected | FrameReceived[H] | PeerFailed | PeerDisconnected | PeerRefused
