"""Opening of a connection with a token, within ten seconds; errors say where and why it failed, and what to do."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

from evener.wire.connection import Connection
from evener.wire.errors import (
    CannotJoin,
    NoAnswer,
    NoMaster,
    NotAMaster,
    NothingListens,
    NoUnixSockets,
    OtherMaster,
    TransportDiffers,
)
from evener.wire.frame import H
from evener.wire.handshake import MAGIC, MESSAGE_BYTES, NONCE_BYTES, NodeHandshake
from evener.wire.identity import Address, Token
from evener.wire.limits import Limits
from evener.wire.resolve import resolve
from evener.wire.sockets import UNIX, waiter
from evener.wire.transport import NotTls, PlainTransport, Transport, explain, tune

JOIN_SECONDS = 8.0
MAX_PAUSE_SECONDS = 10.0
_TLS_ALERT = b"\x15\x03"
_NO_MASTER = "TLSV1_UNRECOGNIZED_NAME"
"""Reason by which the SSL library reports `relay_claim.NO_MASTER`."""
_PAUSE_SECONDS = 0.01
T = TypeVar("T")


def open_connection(
    address: Address, token: Token, headers: Any, limits: Limits | None = None, *, seconds: float = JOIN_SECONDS
) -> Connection[H]:
    """Return a connection to the master at `address`, on which both sides have proved the token's secret.

    Args:
        address: Address of the master.
        token: Token that identifies the master, and says whether to use TLS.
        headers: Type of the headers that the master sends.
        limits: Limits of frames, and the patience of every later wait.
        seconds: Timeout of all of this.

    Raises:
        CannotJoin: The type of the error gives the reason.
    """
    limits, address = limits or Limits(), address.to_dial
    deadline = time.monotonic() + seconds
    sock = connected_socket(address, deadline)
    try:
        tune(sock, limits.patience)
        transport = _authenticate(sock, token, address.description, deadline)
    except BaseException:
        sock.close()
        raise
    return Connection(transport, headers, limits, address.description)


def backoff(random: Random, first: float = 0.1, longest: float = MAX_PAUSE_SECONDS) -> Iterator[float]:
    """Yield the seconds to wait before each retry: doubling up to `longest`, drawn from the upper half.

    Nodes therefore do not all call a returning master at the same moment.
    """
    pause = first
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, longest)


def connected_socket(address: Address, deadline: float) -> socket.socket:
    """Return a socket connected to the first of the machine's addresses that answers. Raises CannotJoin."""
    if not address.path:
        candidates: Sequence[tuple[int, Any]] = resolve(address, deadline)
    elif UNIX is None:
        raise NoUnixSockets(address.description)
    else:
        candidates = [(UNIX, address.path)]
    for num_candidates, (family, where) in zip(range(len(candidates), 0, -1), candidates, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        seconds = max(0.0, deadline - time.monotonic()) / num_candidates
        try:
            _connect(sock, where, seconds)
            return sock
        except OSError as error:
            sock.close()
            failure: CannotJoin = NoAnswer(address.description, explain(error))
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                failure = NothingListens(address.description)
            elif isinstance(error, TimeoutError):
                failure = NoAnswer(address.description, f"{seconds:.0f} s of silence")
    raise failure


def _connect(sock: socket.socket, where: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    sock.settimeout(max(seconds, _PAUSE_SECONDS))
    while True:
        try:
            return sock.connect(where)
        except BlockingIOError:  # a Unix socket with a full backlog
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(_PAUSE_SECONDS)


def _authenticate(sock: socket.socket, token: Token, place: str, deadline: float) -> Transport:
    """Agree on keys, then prove the secret to each other."""
    sock.setblocking(False)  # every wait ends at the same deadline, even if bytes come slowly
    try:
        transport = _encrypt(sock, token.fingerprint, place, deadline) if token.fingerprint else PlainTransport(sock)
        handshake = NodeHandshake(token, secrets.token_bytes(NONCE_BYTES), place)
        message: bytes | None = handshake.hello()
        while message is not None:
            transport.send([memoryview(message)])
            message = handshake.answer(_read_message(transport, place, deadline))
    except TimeoutError as error:
        seen = "it accepted the connection, then nothing came; a master that hangs looks the same"
        raise NotAMaster(place, seen) from error
    except OSError as error:
        raise NotAMaster(place, f"the handshake broke off: {explain(error)}") from error
    return transport


def _encrypt(sock: socket.socket, fingerprint: bytes, place: str, deadline: float) -> Transport:
    """Return a TLS transport to the master whose certificate has this fingerprint."""
    from evener.wire.tls import TlsTransport, node_context

    transport = TlsTransport(sock, node_context(), is_master=False)
    try:
        _in_time(transport.handshake, sock, deadline)
    except NotTls as error:
        if error.first_bytes.startswith(MAGIC):
            raise TransportDiffers(place, "it runs with --insecure, the token's master does not") from error
        raise NotAMaster(place, str(error)) from error
    except OSError as error:
        if getattr(error, "reason", "") == _NO_MASTER:
            raise NoMaster(place) from error
        raise
    if not hmac.compare_digest(transport.fingerprint, fingerprint):
        raise OtherMaster(place)
    return transport


def _read_message(transport: Transport, place: str, deadline: float) -> bytes:
    """Read exactly one message; raise an error as soon as the bytes differ from one."""
    message = bytearray(MESSAGE_BYTES)
    rest = memoryview(message)
    while rest:
        count = _in_time(partial(transport.receive_into, rest), transport.sock, deadline)
        if count == 0:
            raise ConnectionResetError("closed by the peer")
        rest = rest[count:]
        got = bytes(message[: MESSAGE_BYTES - len(rest)])
        if got.startswith(_TLS_ALERT):
            raise TransportDiffers(place, "it uses TLS, the token's master runs with --insecure")
        if not MAGIC.startswith(got[: len(MAGIC)]):
            raise NotAMaster(place, f"it said {got!r}")
    return bytes(message)


def _in_time(action: Callable[[], T], sock: socket.socket, deadline: float) -> T:
    """Return the result of a non-blocking `action`, retried whenever the socket is readable."""
    while True:
        try:
            return action()
        except BlockingIOError:
            if not waiter(sock)(deadline - time.monotonic()):
                raise TimeoutError from None
