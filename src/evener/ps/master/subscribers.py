"""The commands that watch a run, and its log: both get the same events."""

from __future__ import annotations

from collections.abc import Sequence

from evener.ps.master.access.quotas import MAX_LOG_BYTES
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import RunEvents, RunFinished, Send
from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import Phase, RunEvent, encode_events

_INTERVAL_S = 0.25
"""Events are collected for so long before they are sent."""


def open_log(config: MasterConfig, run: str) -> EventLog:
    """Open the log of a run's events."""
    folder = config.home.runs / run
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return EventLog(folder / EVENTS_FILE, config.notify, private=True, most_bytes=MAX_LOG_BYTES)


class Subscribers:
    """The connections of the commands that watch a run.

    Args:
        send: sends a message to a connection.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._peers: set[int] = set()
        self._sent = 0.0
        self._log: EventLog | None = None

    def begin(self, peers: Sequence[int], log: EventLog) -> None:
        """Send the events of a run to `peers`, and write them to `log`, from now on."""
        self._peers, self._log = set(peers), log

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    def remove(self, peer: int) -> bool:
        """Forget a connection; returns whether it watched."""
        watched = peer in self._peers
        self._peers.discard(peer)
        return watched

    def is_time(self, now: float) -> bool:
        """Return whether events have to be sent now, `now` in seconds."""
        if now - self._sent < _INTERVAL_S:
            return False
        self._sent = now
        return True

    def show(self, run: str, events: Sequence[RunEvent]) -> None:
        """Send events of a run, and write them to its log."""
        if self._log is not None:
            for event in events:
                self._log.add(event)
        if events and self._peers:
            data = encode_events(events)
            for peer in self._peers:
                self._send(peer, RunEvents(run=run), (data,))

    def greet(self, peer: int, run: str, events: Sequence[RunEvent]) -> None:
        """Subscribe a connection: send it what has happened in the run so far, and all further events."""
        self._peers.add(peer)
        if events:
            self._send(peer, RunEvents(run=run), (encode_events(events),))

    def end(self, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """Tell all subscribers that the run is over."""
        for peer in self._peers:
            self._send(peer, header, buffers)
        self._peers.clear()
        if self._log is not None:
            self._log.add(Phase(what="failed" if header.kind is not None else "over", detail=header.reason))
        self.close()

    def close(self) -> None:
        """Write the rest of the log to the disk."""
        if self._log is not None:
            self._log.close()
            self._log = None
