"""The commands that watch a run: what happens is collected for a moment, and then told to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.events import RunEvent, encode_events
from evener.ps.members import Member
from evener.ps.messages import RunEvents, RunFinished
from evener.ps.results import plan_of
from evener.ps.run import Run
from evener.ps.submission import Send

_NEWS_SECONDS = 0.25


class Audience:
    """See the first line.

    Args:
        send: to a connection.
        members: of which the plan names the devices.
    """

    def __init__(self, send: Send, members: Mapping[str, Member]) -> None:
        self._send, self._members = send, members
        self._peers: set[int] = set()
        self._words: list[RunEvent] = []
        self._columns = 0
        self._told = 0.0

    def begin(self, peers: Sequence[int], columns: int) -> None:
        """A run begins, or goes on: watched by `peers`, with so many nodes known already."""
        self._peers, self._columns = set(peers), columns

    def add(self, peer: int, run: Run) -> None:
        """Another one wants to hear of the run: from now on, and first how the work is divided."""
        self.tell_news(run)
        self._peers.add(peer)
        self._tell_plan(run)

    def remove(self, peer: int) -> bool:
        """A connection is gone; whether it watched."""
        watched = peer in self._peers
        self._peers.discard(peer)
        return watched

    def tell(self, word: RunEvent) -> None:
        """Have all of them told."""
        self._words.append(word)

    def tick(self, run: Run, now: float) -> None:
        """Tell what has happened, if the time has come; at once how the work is divided when another node came."""
        if len(run.ledger.names) != self._columns and run.server.members:
            self._tell_steps(run)
            self._tell_plan(run)
        if now - self._told >= _NEWS_SECONDS:
            self._told = now
            self.tell_news(run)

    def tell_news(self, run: Run) -> None:
        """Tell what has happened until now."""
        self._tell_steps(run)
        if self._words and self._peers:
            data = encode_events(self._words)
            for peer in self._peers:
                self._send(peer, RunEvents(), (data,))
        self._words.clear()

    def end(self, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """The run is over."""
        for peer in self._peers:
            self._send(peer, header, buffers)
        self._peers.clear()

    def _tell_plan(self, run: Run) -> None:
        self._columns = len(run.ledger.names)
        if self._columns:
            devices = {name: member.device for name, member in self._members.items()}
            self.tell(plan_of(run.job, run.ledger.names, devices, run.costs))

    def _tell_steps(self, run: Run) -> None:
        step = run.ledger.news(self._columns)
        if step is not None and self._columns:
            self.tell(step)
