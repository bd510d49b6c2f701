"""Pieces of blobs for those who ask: the next one is read from the disk when the last one was taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from evener.ps.master.access.quotas import MOST_FETCHES, MOST_FETCHING
from evener.ps.protocol.messages import FetchBlob, Header
from evener.wire.errors import BadFrame
from evener.wire.server import Server


class Fetches:
    """See the first line.

    Args:
        server: of the connections.
        give: sends a peer the piece that it asks for.
    """

    def __init__(self, server: Server[Header], give: Callable[[int, FetchBlob], None]) -> None:
        self._server, self._give = server, give
        self._asked: dict[int, deque[FetchBlob]] = {}
        self._taking: set[int] = set()

    def ask(self, peer: int, fetch: FetchBlob) -> None:
        """Somebody wants a piece. Raises BadFrame: it asks for more than it takes."""
        asked = self._asked.setdefault(peer, deque())
        if len(asked) >= MOST_FETCHES:
            raise BadFrame(f"it asks for more than it takes: {MOST_FETCHES} pieces wait for it")
        asked.append(fetch)
        self.serve()

    def serve(self) -> None:
        """Give a piece to everybody for whom nothing waits, unless too many do not take theirs."""
        self._taking = {peer for peer in self._taking if self._server.num_waiting(peer)}
        for peer in list(self._asked):
            while peer in self._asked and not self._server.num_waiting(peer) and len(self._taking) < MOST_FETCHING:
                asked = self._asked[peer]
                self._give(peer, asked.popleft())
                if not asked:
                    self._asked.pop(peer, None)
                if self._server.num_waiting(peer):
                    self._taking.add(peer)

    def left(self, peer: int) -> None:
        """A connection is gone."""
        self._asked.pop(peer, None)
        self._taking.discard(peer)
