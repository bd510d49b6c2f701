"""Requests for pieces of blobs: a piece is read from the disk when the peer has taken the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from evener.ps.master.access.quotas import MAX_FETCHES, MAX_FETCHING
from evener.ps.protocol.messages import FetchBlob, Header
from evener.wire.errors import BadFrame
from evener.wire.server import Server


class Fetches:
    """The open requests of all peers.

    Args:
        server: server of the connections.
        give: sends a peer the piece that it requested.
    """

    def __init__(self, server: Server[Header], give: Callable[[int, FetchBlob], None]) -> None:
        self._server, self._give = server, give
        self._requests: dict[int, deque[FetchBlob]] = {}
        self._taking: set[int] = set()

    def ask(self, peer: int, fetch: FetchBlob) -> None:
        """Add a peer's request for a piece. Raises BadFrame: too many of its requests are open."""
        requests = self._requests.setdefault(peer, deque())
        if len(requests) >= MAX_FETCHES:
            raise BadFrame(f"too many requests: {MAX_FETCHES} pieces are waiting for this peer")
        requests.append(fetch)
        self.serve()

    def serve(self) -> None:
        """Send a piece to each peer whose queue is empty, unless too many peers do not take theirs."""
        self._taking = {peer for peer in self._taking if self._server.num_waiting(peer)}
        for peer in list(self._requests):
            while peer in self._requests and not self._server.num_waiting(peer) and len(self._taking) < MAX_FETCHING:
                requests = self._requests[peer]
                self._give(peer, requests.popleft())
                if not requests:
                    self._requests.pop(peer, None)
                if self._server.num_waiting(peer):
                    self._taking.add(peer)

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        self._requests.pop(peer, None)
        self._taking.discard(peer)
