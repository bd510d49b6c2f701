"""From a token to a connection, within ten seconds; if there is none, the error says where, why and what to do."""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, TypeVar

from evener.wire.connection import Connection
from evener.wire.errors import (
    CannotJoin,
    NoAnswer,
    NotAMaster,
    NothingListens,
    OtherMaster,
    TransportDiffers,
)
from evener.wire.frame import H
from evener.wire.handshake import MAGIC, MESSAGE_BYTES, NONCE_BYTES, NodeHandshake
from evener.wire.identity import Address, Token
from evener.wire.limits import Limits
from evener.wire.resolve import resolve
from evener.wire.transport import NotTls, PlainTransport, Transport, explain, tune

JOIN_SECONDS = 8.0
LONGEST_PAUSE = 10.0
_TLS_ALERT = b"\x15\x03"
_PAUSE_SECONDS = 0.01
T = TypeVar("T")


def open_connection(
    address: Address, token: Token, headers: Any, limits: Limits | None = None, *, seconds: float = JOIN_SECONDS
) -> Connection[H]:
    """A connection to the master at `address`, on which both sides have proved the token's secret.

    Args:
        address: of the master.
        token: says whom to expect, and whether TLS is spoken.
        headers: type of the headers that the master sends.
        limits: of frames, and the patience of every wait afterwards.
        seconds: within which all this has to be done.

    Raises:
        CannotJoin: of the type that says why not.
    """
    limits = limits or Limits()
    deadline = time.monotonic() + seconds
    sock = _connect_to(address, deadline)
    try:
        tune(sock, limits.patience)
        transport = _authenticate(sock, token, address.words, deadline)
    except BaseException:
        sock.close()
        raise
    return Connection(transport, headers, limits, address.words)


def backoff(random: Random, first: float = 0.1, longest: float = LONGEST_PAUSE) -> Iterator[float]:
    """Seconds to wait before each further try: doubling up to `longest`, each drawn from its upper half.

    So a master that comes back is not called by all nodes at the same moment.
    """
    pause = first
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, longest)


def _connect_to(address: Address, deadline: float) -> socket.socket:
    """A socket connected to the first of the machine's addresses that answers."""
    candidates = [(socket.AF_UNIX, address.path)] if address.path else resolve(address, deadline)
    for left, (family, where) in zip(range(len(candidates), 0, -1), candidates, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        seconds = max(0.0, deadline - time.monotonic()) / left
        try:
            _connect(sock, where, seconds)
            return sock
        except OSError as error:
            sock.close()
            failure: CannotJoin = NoAnswer(address.words, explain(error))
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                failure = NothingListens(address.words)
            elif isinstance(error, TimeoutError):
                failure = NoAnswer(address.words, f"{seconds:.0f} s of silence")
    raise failure


def _connect(sock: socket.socket, where: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    sock.settimeout(max(seconds, _PAUSE_SECONDS))
    while True:
        try:
            return sock.connect(where)
        except BlockingIOError:  # a Unix socket whose master has many callers waiting
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(_PAUSE_SECONDS)


def _authenticate(sock: socket.socket, token: Token, place: str, deadline: float) -> Transport:
    """Agree upon keys, then prove the secret to each other."""
    sock.setblocking(False)  # here every wait ends at the same deadline, however slowly bytes drip
    try:
        transport = _encrypt(sock, token.fingerprint, place, deadline) if token.fingerprint else PlainTransport(sock)
        handshake = NodeHandshake(token, secrets.token_bytes(NONCE_BYTES), place)
        message: bytes | None = handshake.hello()
        while message is not None:
            transport.send([memoryview(message)])
            message = handshake.answer(_read_message(transport, place, deadline))
    except TimeoutError as error:
        seen = "the connection was taken, then silence; a master that hangs looks the same"
        raise NotAMaster(place, seen) from error
    except OSError as error:
        raise NotAMaster(place, f"it broke off the greeting: {explain(error)}") from error
    return transport


def _encrypt(sock: socket.socket, fingerprint: bytes, place: str, deadline: float) -> Transport:
    """A TLS transport to the master whose certificate has this fingerprint."""
    from evener.wire.tls import TlsTransport, node_context

    transport = TlsTransport(sock, node_context(), is_master=False)
    try:
        _in_time(transport.handshake, sock, deadline)
    except NotTls as error:
        if error.first_bytes.startswith(MAGIC):
            raise TransportDiffers(place, "it runs with --insecure, the token's master does not") from error
        raise NotAMaster(place, str(error)) from error
    if not hmac.compare_digest(transport.fingerprint, fingerprint):
        raise OtherMaster(place)
    return transport


def _read_message(transport: Transport, place: str, deadline: float) -> bytes:
    """Exactly one message; whatever does not begin like one is an error at once."""
    message = bytearray(MESSAGE_BYTES)
    rest = memoryview(message)
    while rest:
        count = _in_time(partial(transport.receive_into, rest), transport.sock, deadline)
        if count == 0:
            raise ConnectionResetError("closed by the peer")
        rest = rest[count:]
        got = bytes(message[: MESSAGE_BYTES - len(rest)])
        if got.startswith(_TLS_ALERT):
            raise TransportDiffers(place, "it speaks TLS, the token's master runs with --insecure")
        if not MAGIC.startswith(got[: len(MAGIC)]):
            raise NotAMaster(place, f"it said {got!r}")
    return bytes(message)


def _in_time(action: Callable[[], T], sock: socket.socket, deadline: float) -> T:
    """The result of a non-blocking `action`, tried again whenever something has come."""
    while True:
        try:
            return action()
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError from None
