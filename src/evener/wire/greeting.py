"""How two sides prove to each other that they share the token's secret, without either ever sending it.

    node                                            master
      HELLO      nonce a                     ->
                                             <-     CHALLENGE  nonce b
      PROOF      HMAC(secret, "node", t)     ->
                                             <-     WELCOME    HMAC(secret, "master", t)

with t = version, fingerprint of the certificate that the node saw (zeros without TLS), a, b. Both nonces are fresh, so
nothing can be replayed; the two labels differ, so nothing can be sent back; the fingerprint is in it, so a proof given
over one certificate is worth nothing over another. Every note has the same 40 bytes, and a master parses nothing else
of somebody who has not proved the secret. No sockets here: notes go in, notes come out.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

from evener.wire.refusals import (
    CannotJoin,
    MasterFull,
    NotAMaster,
    TransportDiffers,
    VersionDiffers,
    WrongSecret,
)
from evener.wire.token import FINGERPRINT_BYTES, Token

VERSION = 1
NONCE_BYTES = 32
MAGIC = b"EVENER"
_NOTE = struct.Struct("<6sBB32s")
NOTE_BYTES = _NOTE.size


class Kind(IntEnum):
    """What a note says."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    WRONG_SECRET = 16
    WRONG_VERSION = 17
    FULL = 18
    NO_HELLO = 19
    TLS_HERE = 20


_REFUSALS: dict[int, type[CannotJoin]] = {
    Kind.WRONG_SECRET: WrongSecret,
    Kind.WRONG_VERSION: VersionDiffers,
    Kind.FULL: MasterFull,
    Kind.NO_HELLO: NotAMaster,
    Kind.TLS_HERE: TransportDiffers,
}
_REASONS = {
    Kind.WRONG_SECRET: "it does not know the secret",
    Kind.WRONG_VERSION: "it speaks another version of the wire",
    Kind.FULL: "there are as many connections as there may be",
    Kind.NO_HELLO: "it does not greet as an Evener node does",
    Kind.TLS_HERE: "it does not speak TLS",
}


def note(kind: Kind, body: bytes = bytes(NONCE_BYTES)) -> bytes:
    """The 40 bytes that say `kind`, with a nonce or a proof."""
    return _NOTE.pack(MAGIC, VERSION, kind, body)


class Reply(NamedTuple):
    """What a master answers to a note.

    Attributes:
        note: to be sent.
        welcome: whether the peer has proved the secret.
        refusal: why the connection is to be closed, or empty.
    """

    note: bytes
    welcome: bool = False
    refusal: str = ""


def refuse(kind: Kind) -> Reply:
    """The reply that closes a connection."""
    return Reply(note(kind), refusal=_REASONS[kind])


class MasterGreeting:
    """The master's side of one greeting.

    Args:
        token: of this master.
        nonce: 32 fresh random bytes.
    """

    def __init__(self, token: Token, nonce: bytes) -> None:
        self._token, self._nonce = token, nonce
        self._node_nonce: bytes | None = None

    def answer(self, received: bytes, *, full: bool) -> Reply:
        """The reply to a note of 40 bytes; `full` says that nobody more may be welcomed."""
        magic, version, kind, body = _NOTE.unpack(received)
        if magic != MAGIC:
            return refuse(Kind.NO_HELLO)
        if version != VERSION:
            return refuse(Kind.WRONG_VERSION)
        if self._node_nonce is None and kind == Kind.HELLO:
            self._node_nonce = body
            return Reply(note(Kind.CHALLENGE, self._nonce))
        if self._node_nonce is None or kind != Kind.PROOF:
            return refuse(Kind.NO_HELLO)
        if not hmac.compare_digest(body, _proof(self._token, b"node", self._node_nonce, self._nonce)):
            return refuse(Kind.WRONG_SECRET)
        if full:
            return refuse(Kind.FULL)
        return Reply(note(Kind.WELCOME, _proof(self._token, b"master", self._node_nonce, self._nonce)), welcome=True)


class NodeGreeting:
    """The node's side of one greeting.

    Args:
        token: with which it joins.
        nonce: 32 fresh random bytes.
        place: of the master in words, for errors.
    """

    def __init__(self, token: Token, nonce: bytes, place: str) -> None:
        self._token, self._nonce, self._place = token, nonce, place
        self._master_nonce: bytes | None = None

    def hello(self) -> bytes:
        """The first note."""
        return note(Kind.HELLO, self._nonce)

    def answer(self, received: bytes) -> bytes | None:
        """The note that answers one of the master's; None when both have proved the secret.

        Raises:
            CannotJoin: of the type that says why.
        """
        magic, version, kind, body = _NOTE.unpack(received)
        if magic != MAGIC:
            raise NotAMaster(self._place, "it answered in another language")
        if kind in _REFUSALS:
            raise _REFUSALS[kind](self._place, f"version {version} there, {VERSION} here" * (version != VERSION))
        if version != VERSION:
            raise VersionDiffers(self._place, f"version {version} there, {VERSION} here")
        if self._master_nonce is None and kind == Kind.CHALLENGE:
            self._master_nonce = body
            return note(Kind.PROOF, _proof(self._token, b"node", self._nonce, body))
        if self._master_nonce is None or kind != Kind.WELCOME:
            raise NotAMaster(self._place, "it does not keep to the greeting")
        if not hmac.compare_digest(body, _proof(self._token, b"master", self._nonce, self._master_nonce)):
            raise WrongSecret(self._place)
        return None


def _proof(token: Token, side: bytes, node_nonce: bytes, master_nonce: bytes) -> bytes:
    fingerprint = token.fingerprint or bytes(FINGERPRINT_BYTES)
    transcript = b"evener wire %d %s " % (VERSION, side) + fingerprint + node_nonce + master_nonce
    return hmac.digest(token.secret, transcript, "sha256")
