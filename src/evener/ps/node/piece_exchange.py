"""Pieces of blobs pass between nodes: a node serves those that it has, and fetches others where the master says.

    node A   OfferPieces -> master        it listens, with a token of its own, while it takes part in the run
    node B   FetchBlob -> master          FetchFrom -> B: the master has sent this piece to A
             FetchBlob -> A               BlobChunk -> B, at once or when the piece has come to A

Both sides prove the token, and B checks each piece with the head of the blob, which came from the master. A node that
cannot be reached, is silent or sends something else costs only time: the master sends the piece itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from evener.ps.protocol.blob import CHUNK_BYTES
from evener.ps.protocol.messages import BlobChunk, FetchBlob, FetchFrom, Heartbeat, OfferPieces
from evener.records.errors import EvenerError
from evener.wire.connect import open_connection
from evener.wire.errors import BadFrame, CannotListen
from evener.wire.identity import Address, Token, make_identity
from evener.wire.limits import Limits
from evener.wire.server import Server
from evener.wire.server_events import FrameReceived, PeerDisconnected

MAX_OPEN = 8
"""Requests of a node that may be open at another one."""
_AHEAD = 4
"""Requests that a node opens: more would delay the pieces that it needs first."""
SILENT_SECONDS = 20.0
"""Time without a piece after which a node is asked for no more: what was sent to it before may take that long."""
_CONNECT_SECONDS = 4.0
_POLL_SECONDS, _WAITING_POLL_SECONDS = 0.1, 0.02
_BEAT_SECONDS = 3.0
_LIMITS = Limits(buffers=1, frame_bytes=CHUNK_BYTES, connections=64)

Reads: TypeAlias = Callable[[FetchBlob], tuple[BlobChunk, bytes] | None]
"""Returns a piece, or an empty one of a blob that is not here; None for a piece that has not come yet."""


class PieceServer:
    """Serves pieces to other nodes, in a thread; close it.

    Args:
        host: address of this machine at which other nodes reach it.
        reads: returns a piece, as `Reads` says; called in the thread.
        is_insecure: whether connections are not encrypted, as those of the master.

    Attributes:
        offer: says where pieces are served.

    Raises:
        EvenerError: it cannot listen.
    """

    def __init__(self, host: str, reads: Reads, *, is_insecure: bool) -> None:
        identity = make_identity(insecure=is_insecure)
        self._reads = reads
        self._server: Server[FetchBlob] = Server(FetchBlob, identity, _LIMITS)
        try:
            address = self._server.listen(Address(host=host))
        except CannotListen:
            self._server.close()
            raise
        self.offer = OfferPieces(address=str(address), token=identity.token.text)
        self._open: dict[int, deque[FetchBlob]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="evener-pieces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close all connections."""
        self._is_over.set()
        self._thread.join()

    def _serve(self) -> None:
        beaten = time.monotonic()
        while not self._is_over.is_set():
            for event in self._server.poll(_WAITING_POLL_SECONDS if self._open else _POLL_SECONDS):
                if isinstance(event, FrameReceived):
                    self._on_fetch(event.peer, event.header)
                elif isinstance(event, PeerDisconnected):
                    self._open.pop(event.peer, None)
            self._answer()
            if time.monotonic() - beaten > _BEAT_SECONDS:
                beaten = time.monotonic()
                for peer in self._open:
                    self._server.send(peer, Heartbeat())
        self._server.close("its part in the run has ended")

    def _on_fetch(self, peer: int, fetch: FetchBlob) -> None:
        requests = self._open.setdefault(peer, deque())
        if len(requests) >= MAX_OPEN:
            self._open.pop(peer)
            self._server.fail(peer, BadFrame(f"too many requests: {MAX_OPEN} pieces are waiting for this node"))
        else:
            requests.append(fetch)

    def _answer(self) -> None:
        """Send each peer whose queue is empty the first piece that has come of those that it requests."""
        for peer, requests in list(self._open.items()):
            for fetch in [] if self._server.num_waiting(peer) else list(requests):
                if (piece := self._reads(fetch)) is not None:
                    requests.remove(fetch)
                    self._server.send(peer, piece[0], (piece[1],))
                    break
            if not requests:
                del self._open[peer]


class Holder:
    """Another node that has pieces, from which a thread fetches them; close it.

    Args:
        where: says where it serves them.
        deliver: takes a piece; called in the thread. It raises EvenerError for a wrong one.
        lost: takes the requests that are not answered, when no more can be fetched; called in the thread.

    Attributes:
        is_over: whether no more can be fetched from this node.
    """

    def __init__(
        self,
        where: FetchFrom,
        deliver: Callable[[BlobChunk, memoryview], None],
        lost: Callable[[list[FetchBlob]], None],
    ) -> None:
        self._where, self._deliver, self._lost = where, deliver, lost
        self._changed = threading.Condition()
        self._waiting: deque[FetchBlob] = deque()
        self._sent: list[FetchBlob] = []
        self.is_over = False
        self._connection: Any = None
        self._num_delivered, self._busy_seconds = 0, 0.0
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._fetch, name="evener-fetch-pieces", daemon=True)
        self._thread.start()

    def request(self, fetch: FetchBlob, *, is_urgent: bool = False) -> bool:
        """Have a piece fetched, next if it is urgent; return false if no more can be fetched from this node."""
        with self._changed:
            if not self.is_over:
                (self._waiting.appendleft if is_urgent else self._waiting.append)(fetch)
                self._changed.notify()
            return not self.is_over

    def prioritise(self, offset: int) -> bool:
        """Have the piece at `offset` fetched next; return whether it is fetched from here."""
        with self._changed:
            for fetch in self._waiting:
                if fetch.offset == offset:
                    self._waiting.remove(fetch)
                    self._waiting.appendleft(fetch)
                    return True
            return any(fetch.offset == offset for fetch in self._sent)

    def give_back(self) -> FetchBlob | None:
        """Return the last request that has not been sent, and drop it; None if all have been."""
        with self._changed:
            return self._waiting.pop() if self._waiting else None

    @property
    def rate(self) -> float:
        """Pieces per second while any were requested, with the next one."""
        since, now = self._busy_since, time.monotonic()
        seconds = self._busy_seconds + (0.0 if since is None else now - since)
        return (self._num_delivered + 1) / max(seconds, 1e-3)

    @property
    def backlog_seconds(self) -> float:
        """Seconds that all requests would take at this rate."""
        return (len(self._waiting) + len(self._sent)) / self.rate

    def close(self) -> None:
        """Have the thread end soon."""
        with self._changed:
            self.is_over = True
            self._changed.notify()
        if (connection := self._connection) is not None:
            connection.close()

    def _fetch(self) -> None:
        with suppress(EvenerError):  # the master then sends the remaining pieces
            token, address = Token.parse(self._where.token), Address.parse(self._where.address)
            with open_connection(
                address, token, BlobChunk | Heartbeat, _LIMITS, seconds=_CONNECT_SECONDS
            ) as self._connection:
                while self._next():
                    pass
        with self._changed:
            self.is_over = True
            left = [*self._sent, *self._waiting]
            self._waiting.clear()
        self._lost(left)

    def _next(self) -> bool:
        """Send requests, and take a piece; return false when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._sent or self.is_over)
            if self.is_over:
                return False
            new = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AHEAD - len(self._sent)))]
            self._sent += new
        began = self._busy_since = time.monotonic()
        for fetch in new:
            self._connection.send(fetch)
        while True:
            frame = self._connection.receive()
            if isinstance(header := frame.header, BlobChunk):
                break
            if time.monotonic() - began > SILENT_SECONDS:
                return False
        self._busy_seconds, self._busy_since = self._busy_seconds + time.monotonic() - began, None
        answered = [one for one in self._sent if (one.digest, one.offset) == (header.digest, header.offset)]
        if not answered or not frame.buffers:
            return False
        self._deliver(header, frame.buffers[0])
        self._num_delivered += 1
        with self._changed:
            self._sent.remove(answered[0])
        return True
