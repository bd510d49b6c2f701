"""The handshake: both sides prove that they share the token's secret, without sending it.

    node                                            master
      HELLO      nonce a                     ->
                                             <-     CHALLENGE  nonce b
      PROOF      HMAC(secret, "node", t)     ->
                                             <-     WELCOME    HMAC(secret, "master", t)

with t = version, fingerprint of the certificate that the node saw (zeros without TLS), a, b. Fresh nonces prevent
replay, different labels prevent reflection, and the fingerprint binds a proof to one certificate. Every message has 40
bytes, and a master parses nothing else from an unauthenticated peer. This module uses no sockets: messages go in,
messages come out.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from evener.wire.errors import (
    CannotJoin,
    MasterFull,
    NotAMaster,
    TransportDiffers,
    VersionDiffers,
    WrongSecret,
)
from evener.wire.identity import FINGERPRINT_BYTES, Grant, Token

VERSION = 1
NONCE_BYTES = 32
MAGIC = b"EVENER"
_MESSAGE = struct.Struct("<6sBB32s")
MESSAGE_BYTES = _MESSAGE.size


class HandshakeType(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    WRONG_SECRET = 16
    WRONG_VERSION = 17
    FULL = 18
    NO_HELLO = 19
    TLS_HERE = 20


_REFUSALS: dict[int, tuple[type[CannotJoin], str]] = {
    HandshakeType.WRONG_SECRET: (WrongSecret, "it does not know the secret"),
    HandshakeType.WRONG_VERSION: (VersionDiffers, "it uses another protocol version"),
    HandshakeType.FULL: (MasterFull, "the limit of connections is reached"),
    HandshakeType.NO_HELLO: (NotAMaster, "not an Evener client (bad handshake)"),
    HandshakeType.TLS_HERE: (TransportDiffers, "it does not use TLS"),
}
"""The error that a node raises, and the master's reason, by kind of refusal."""


def encode_message(kind: HandshakeType, body: bytes = bytes(NONCE_BYTES)) -> bytes:
    """Return the 40 bytes of a message of this `kind`, with a nonce or a proof."""
    return _MESSAGE.pack(MAGIC, VERSION, kind, body)


class HandshakeReply(NamedTuple):
    """A master's answer to a message.

    Attributes:
        message: The bytes to send.
        welcome: Whether the peer has proved the secret.
        refusal: The reason to close the connection, or empty.
        grant: What the proved token allows.
    """

    message: bytes
    welcome: bool = False
    refusal: str = ""
    grant: Grant = Grant()


def refuse(kind: HandshakeType) -> HandshakeReply:
    """Return the reply that closes a connection."""
    return HandshakeReply(encode_message(kind), refusal=_REFUSALS[kind][1])


class MasterHandshake:
    """The master's side of one handshake.

    Args:
        token: The token of this master.
        nonce: 32 fresh random bytes.
        others: Tokens that allow less, by what they allow.
    """

    def __init__(self, token: Token, nonce: bytes, others: Mapping[Grant, Token] = MappingProxyType({})) -> None:
        self._tokens: dict[Grant, Token] = {Grant(): token, **others}
        self._nonce = nonce
        self._node_nonce: bytes | None = None

    def answer(self, received: bytes, is_full: Callable[[Grant], bool] = lambda _: False) -> HandshakeReply:
        """Return the reply to a message of 40 bytes; `is_full` says whether no more such tokens are accepted."""
        magic, version, kind, body = _MESSAGE.unpack(received)
        if magic != MAGIC:
            return refuse(HandshakeType.NO_HELLO)
        if version != VERSION:
            return refuse(HandshakeType.WRONG_VERSION)
        if self._node_nonce is None and kind == HandshakeType.HELLO:
            self._node_nonce = body
            return HandshakeReply(encode_message(HandshakeType.CHALLENGE, self._nonce))
        if self._node_nonce is None or kind != HandshakeType.PROOF:
            return refuse(HandshakeType.NO_HELLO)
        nonces = self._node_nonce, self._nonce
        proofs = {grant: _proof(one, b"node", *nonces) for grant, one in self._tokens.items()}
        proved = [grant for grant, proof in proofs.items() if hmac.compare_digest(body, proof)]
        if not proved:
            return refuse(HandshakeType.WRONG_SECRET)
        if is_full(proved[0]):
            return refuse(HandshakeType.FULL)
        proof = _proof(self._tokens[proved[0]], b"master", *nonces)
        return HandshakeReply(encode_message(HandshakeType.WELCOME, proof), welcome=True, grant=proved[0])

    def session_key(self) -> bytes:
        """Return the shared key, of 32 bytes, of a connection on which an admin was accepted."""
        assert self._node_nonce is not None
        return _proof(self._tokens[Grant()], b"session", self._node_nonce, self._nonce)


class NodeHandshake:
    """The node's side of one handshake.

    Args:
        token: The token with which it joins.
        nonce: 32 fresh random bytes.
        place: Description of the master, for errors.
    """

    def __init__(self, token: Token, nonce: bytes, place: str) -> None:
        self._token, self._nonce, self._place = token, nonce, place
        self._master_nonce: bytes | None = None

    def hello(self) -> bytes:
        """Return the first message."""
        return encode_message(HandshakeType.HELLO, self._nonce)

    def answer(self, received: bytes) -> bytes | None:
        """Return the answer to one of the master's messages; None when both sides have proved the secret.

        Raises:
            CannotJoin: The type of the error gives the reason.
        """
        magic, version, kind, body = _MESSAGE.unpack(received)
        if magic != MAGIC:
            raise NotAMaster(self._place, "it uses another protocol")
        if kind in _REFUSALS:
            raise _REFUSALS[kind][0](self._place, f"version {version} there, {VERSION} here" * (version != VERSION))
        if version != VERSION:
            raise VersionDiffers(self._place, f"version {version} there, {VERSION} here")
        if self._master_nonce is None and kind == HandshakeType.CHALLENGE:
            self._master_nonce = body
            return encode_message(HandshakeType.PROOF, _proof(self._token, b"node", self._nonce, body))
        if self._master_nonce is None or kind != HandshakeType.WELCOME:
            raise NotAMaster(self._place, "unexpected handshake message")
        if not hmac.compare_digest(body, _proof(self._token, b"master", self._nonce, self._master_nonce)):
            raise WrongSecret(self._place)
        return None

    def session_key(self) -> bytes:
        """Return the shared key, of 32 bytes, once both sides have proved the secret."""
        assert self._master_nonce is not None
        return _proof(self._token, b"session", self._nonce, self._master_nonce)


def _proof(token: Token, side: bytes, node_nonce: bytes, master_nonce: bytes) -> bytes:
    fingerprint = token.fingerprint or bytes(FINGERPRINT_BYTES)
    transcript = b"evener wire %d %s " % (VERSION, side) + fingerprint + node_nonce + master_nonce
    return hmac.digest(token.secret, transcript, "sha256")
