"""A master's connections to a relay, on which nodes arrive; see `relay.py`.

A thread keeps a few of them waiting. The server watches them like listening sockets: when the first bytes of a node
come, the connection is one that was accepted, and the thread opens another one.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from random import Random

from evener.wire.connect import JOIN_SECONDS, backoff, connected_socket
from evener.wire.errors import CannotJoin, CannotRelay
from evener.wire.identity import Address
from evener.wire.relay_claim import ACCEPTED, CHALLENGE_BYTES, MAGIC, NAME_BYTES, NONCE_BYTES, is_proof, proof_of
from evener.wire.transport import explain, tune

_NUM_WAITING = 8
"""Connections that wait for nodes; as many nodes may arrive at once."""
_PAUSE_SECONDS = 0.02
"""Pause after each new connection: a relay that accepts connections and ends them must not keep the thread busy."""


class RelayLines:
    """Connections to a relay; close them.

    Args:
        address: Address of the relay.
        key: That the relay printed.
        patience: Seconds of silence after which the system looks whether a connection is alive.
        notify: Called with a sentence when the relay cannot be reached, and when it can again.

    Attributes:
        address: Address of the relay.
        signal: Socket that becomes readable when `opened` has connections.
    """

    def __init__(self, address: Address, key: str, patience: float, notify: Callable[[str], None]) -> None:
        self.address = address
        self._key, self._patience, self._notify = key, patience, notify
        started = time.time_ns().to_bytes(8)  # a later master takes the place of an earlier one
        self._name = started + secrets.token_bytes(NAME_BYTES - len(started))
        self._opened: SimpleQueue[socket.socket] = SimpleQueue()
        self._missing = threading.Semaphore(_NUM_WAITING)
        self._is_closed = threading.Event()
        self.signal, self._sender = socket.socketpair()
        self.signal.setblocking(False)
        self._thread = threading.Thread(target=self._keep, name="evener-relay", daemon=True)

    def start(self, *, waits: bool = False) -> None:
        """Open a first connection, and keep others open in a thread.

        Args:
            waits: Whether the relay may be reached later.

        Raises:
            CannotRelay: The relay cannot be reached, or does not know the key.
        """
        if not waits:
            self._add(self._claimed())
            self._missing.acquire()
        self._thread.start()

    def opened(self) -> list[socket.socket]:
        """Return the connections that were opened since the last call."""
        sockets = list[socket.socket]()
        with suppress(BlockingIOError):
            while self.signal.recv(64):
                pass
        with suppress(Empty):
            while True:
                sockets.append(self._opened.get_nowait())
        return sockets

    def renew(self) -> None:
        """Open another connection, as one was used or has ended."""
        self._missing.release()

    def close(self) -> None:
        """Stop opening connections, and close those that `opened` has not returned."""
        self._is_closed.set()
        self._missing.release()
        for sock in (*self.opened(), self.signal, self._sender):
            sock.close()

    def _keep(self) -> None:
        pauses, is_away = backoff(Random()), False
        while self._missing.acquire() and not self._is_closed.is_set():
            while not self._is_closed.is_set():
                try:
                    sock = self._claimed()
                except CannotRelay as error:
                    if not is_away:
                        self._notify(f"warning: no node can come through the relay: {error}")
                    is_away = True
                    self._is_closed.wait(next(pauses))
                    continue
                if is_away:
                    self._notify(f"the relay at {self.address.description} can be reached again")
                pauses, is_away = backoff(Random()), False
                self._add(sock)
                self._is_closed.wait(_PAUSE_SECONDS)
                break

    def _add(self, sock: socket.socket) -> None:
        self._opened.put(sock)
        try:
            self._sender.send(b".")
        except OSError:  # closed meanwhile
            sock.close()

    def _claimed(self) -> socket.socket:
        """Return a new connection on which a node may arrive. Raises CannotRelay."""
        place = self.address.description
        try:
            sock = connected_socket(self.address, time.monotonic() + JOIN_SECONDS)
        except CannotJoin as error:
            raise CannotRelay(place, error.rule) from error
        try:
            tune(sock, self._patience)
            sock.settimeout(JOIN_SECONDS)
            claim = MAGIC + self._name + secrets.token_bytes(NONCE_BYTES)
            sock.sendall(claim)
            answer = _received(sock, CHALLENGE_BYTES)
            nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
            if not is_proof(proof, self._key, b"relay", claim, nonce):
                raise CannotRelay(place, "it does not know the key; give the one that `evener relay` printed")
            sock.sendall(proof_of(self._key, b"master", claim, nonce))
            if _received(sock, 1) != ACCEPTED:
                raise CannotRelay(place, "another master that started later uses it; start another relay")
            sock.setblocking(False)
        except (OSError, CannotRelay) as error:
            sock.close()
            if isinstance(error, CannotRelay):
                raise
            reason = f"the program at that port is not a relay ({explain(error)}); `evener relay` prints the right one"
            raise CannotRelay(place, reason) from error
        return sock


def _received(sock: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes. Raises OSError."""
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed by the peer")
        data += piece
    return data
