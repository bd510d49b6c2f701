"""Commands that watch a run, and what they are told of it; its log is told the same."""

from __future__ import annotations

from collections.abc import Sequence

from evener.ps.master.access.quotas import MOST_LOG_BYTES
from evener.ps.master.nodes import Nodes
from evener.ps.master.results import plan_of
from evener.ps.master.training_run import TrainingRun
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.messages import RunEvents, RunFinished, Send
from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import Phase, RunEvent, encode_events

_SECONDS = 0.25
"""For which events are collected."""


def open_log(config: MasterConfig, run: str) -> EventLog:
    """Where all that happens in a run is kept."""
    folder = config.home.runs / run
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return EventLog(folder / EVENTS_FILE, config.notify, private=True, most_bytes=MOST_LOG_BYTES)


class Subscribers:
    """The commands that watch a run: what happens is collected for a moment, and then sent to all of them.

    Args:
        nodes: of which the plan names the devices.
        send: to connections.
    """

    def __init__(self, nodes: Nodes, send: Send) -> None:
        self._nodes, self._send = nodes, send
        self._peers: set[int] = set()
        self._columns = 0
        self._sent = 0.0
        self._log: EventLog | None = None

    def begin(self, peers: Sequence[int], columns: int, log: EventLog) -> None:
        """A run begins, or goes on: watched by `peers`, with so many nodes known already, and kept in `log`."""
        self._peers, self._columns, self._log = set(peers), columns, log

    def add(self, peer: int, run: TrainingRun) -> None:
        """Another one subscribes: to what happens from now on, and first to the epochs before and the division."""
        self.flush(run)
        self.greet(peer, run.job.run, [*run.journal.history.epochs, *self._plan(run)])

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    def remove(self, peer: int) -> bool:
        """A connection is gone; whether it watched."""
        watched = peer in self._peers
        self._peers.discard(peer)
        return watched

    def tick(self, run: TrainingRun, now: float) -> None:
        """Send what has happened, if the time has come; at once how the work is divided when another node came."""
        if len(run.journal.history.totals) != self._columns and run.server.members:
            self._add_steps(run)
            self._add_plan(run)
        if self.is_time(now):
            self.flush(run)

    def is_time(self, now: float) -> bool:
        """Whether it is time to send what has happened."""
        if now - self._sent < _SECONDS:
            return False
        self._sent = now
        return True

    def flush(self, run: TrainingRun) -> None:
        """Send what has happened until now."""
        self._add_steps(run)
        self.show(run.job.run, run.journal.events)
        run.journal.events.clear()

    def show(self, run: str, events: Sequence[RunEvent]) -> None:
        """Send, and keep, what has happened in a run."""
        if self._log is not None:
            for event in events:
                self._log.add(event)
        if events and self._peers:
            data = encode_events(events)
            for peer in self._peers:
                self._send(peer, RunEvents(run=run), (data,))

    def greet(self, peer: int, run: str, events: Sequence[RunEvent]) -> None:
        """Another one subscribes to a run: from now on, and first to what has happened."""
        self._peers.add(peer)
        if events:
            self._send(peer, RunEvents(run=run), (encode_events(events),))

    def end(self, header: RunFinished, buffers: Sequence[bytes]) -> None:
        """The run is over."""
        for peer in self._peers:
            self._send(peer, header, buffers)
        self._peers.clear()
        if self._log is not None:
            self._log.add(Phase(what="failed" if header.kind is not None else "over", detail=header.reason))
        self.close()

    def close(self) -> None:
        """What the log has is on its way to the disk."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _add_plan(self, run: TrainingRun) -> None:
        self._columns = len(run.journal.history.totals)
        run.journal.events += self._plan(run)

    def _plan(self, run: TrainingRun) -> list[RunEvent]:
        """How much there is to do, and how it is divided, once somebody has a part in it."""
        names = run.journal.history.names
        return [self._phase(run), plan_of(run.job, names, self._nodes.by_name, run.speeds.costs)] if names else []

    def _phase(self, run: TrainingRun) -> Phase:
        """How much there is to do, and how much of it is done."""
        workload, works = run.job.workload, run.journal.history.totals.values()
        total = round(workload.num_samples * run.job.agreement.fraction) * (workload.num_epochs or 0)
        done = min(total, sum(work.samples for work in works))
        return Phase(what="training", num_samples=total, done=done, epochs=workload.num_epochs or 0)

    def _add_steps(self, run: TrainingRun) -> None:
        step = run.journal.history.news(self._columns)
        if step is not None and self._columns:
            run.journal.events.append(step)
