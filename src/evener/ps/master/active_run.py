"""The base of a run in progress at the master, whatever its kind; the scheduler knows runs by this class alone.

ActiveLeaseRun    nodes work on leases, and the master agrees on the weights with them
ActiveRankRun     ranks on the nodes work together, and the master coordinates them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from evener.ps.master.access.quotas import MAX_LOG_BYTES
from evener.ps.master.node_state import NodeEvent
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.job import AnyJob
from evener.ps.protocol.messages import Release, RunEvents, RunFinished, Send
from evener.ps.protocol.run_result import RunResult, save_result
from evener.ps.protocol.status import RunStatus
from evener.records.error_kind import kind_of
from evener.records.errors import EvenerError
from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import Phase, RunEvent, encode_events
from evener.records.history import NodeWork
from evener.records.schema import shown
from evener.wire.frame import Buffer


class RunStore(Protocol):
    """The files with which the next master continues a run."""

    def forget(self) -> None:
        """Remove the files: the run is over."""
        ...

    def set_aside(self) -> str:
        """Move the files to where no other run finds them; returns a clause that names the place."""
        ...

    def close(self) -> None:
        """Finish writing; the files stay."""
        ...


class ActiveRun(ABC):
    """A run in progress: its nodes, its subscribers and its result.

    Args:
        config: of the master.
        nodes: all nodes of the master.
        send: sends a message to a connection.
        store: the files of the run.

    Attributes:
        store: see above.
        subscribers: the commands that watch the run.
    """

    def __init__(self, config: MasterConfig, nodes: Nodes, send: Send, store: RunStore) -> None:
        self._config, self._nodes, self._send, self.store = config, nodes, send, store
        self.subscribers = Subscribers(send)

    @property
    @abstractmethod
    def job(self) -> AnyJob:
        """The job to do."""

    @property
    def claim(self) -> AnyJob:
        """The job, with all nodes that no other run may have."""
        return self.job

    @property
    @abstractmethod
    def failure(self) -> EvenerError | None:
        """The error that ends the run; None if it can go on."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether everything is done."""

    @property
    @abstractmethod
    def status(self) -> RunStatus:
        """State of the run, for `evener nodes`."""

    @property
    def works(self) -> Mapping[str, NodeWork]:
        """Work of each node for the run, by name, as far as the master counts it."""
        return {}

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Memory that the run may take for weights and what belongs to them."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.job.run

    @property
    def folder(self) -> Path:
        """Folder of the run's log and results."""
        return self._config.home.runs / self.name

    @property
    def present(self) -> list[NodeRecord]:
        """Nodes that are connected and work for the run."""
        return [node for node in self._nodes.present if self.job.takes(node.name)]

    @property
    def is_over(self) -> bool:
        """Whether the run has failed or is complete."""
        return self.failure is not None or self.is_complete

    def begin(self, watchers: Sequence[int]) -> None:
        """Open the log of the run, and send its events to the connections `watchers`."""
        self.subscribers.begin(watchers, open_log(self._config, self.name))

    def watch(self, peer: int) -> None:
        """Send the events so far, and all further ones, to a connection."""
        self.flush()
        self.subscribers.greet(peer, self.name, self.events_so_far())

    def flush(self) -> None:
        """Send new events to the subscribers."""
        self.subscribers.show(self.name, self.take_events())

    def tick(self, now: float, is_delivering: Callable[[int], bool]) -> None:
        """Do what is due; send new events a few times a second.

        Args:
            now: seconds.
            is_delivering: whether a message is on its way to a connection and makes progress.
        """
        self.advance(is_delivering)
        if self.subscribers.is_time(now):
            self.flush()

    def conclude(self, error: EvenerError | None) -> tuple[RunFinished, RunResult | None, str]:
        """Save what the run has produced.

        Args:
            error: why the run ended early; None if it is complete.

        Returns:
            The message for subscribers, the result if there is one, and a clause that says where it is.
        """
        self.flush()
        result = self.result(error)
        header = RunFinished(kind=result.kind, reason=result.reason, run=self.name)
        if not result.record and not result.weights:
            self.store.forget()
            return header, None, "no results were produced"
        try:
            save_result(self.folder, result)
        except OSError as failure:
            where = f"its results cannot be written ({failure.strerror}); {self.store.set_aside()}"
        else:
            self.store.forget()
            where = f"results are in {self.folder}"
        return header, result, where

    def release(self, header: RunFinished, buffers: Sequence[Buffer]) -> None:
        """Tell subscribers and nodes that the run is over."""
        self.subscribers.end(header, buffers)
        self._nodes.forget_rounds(self.name)
        for node in self._nodes.by_name.values():
            node.left_out_of.discard(self.name)
            if self.job.takes(node.name):
                self.dismiss(node)

    def dismiss(self, node: NodeRecord) -> None:
        """End a node's part in the run."""
        node.ready_for, node.doing, node.worker = "", "waits", None
        self._send(node.peer, Release(run=self.name))

    def close(self) -> None:
        """Write the run to the disk as it stands: the master ends, and the next one may continue the run."""
        self.subscribers.close()
        self.free()

    def free(self) -> None:
        """Free what the run holds; its files stay."""
        self.store.close()

    @abstractmethod
    def assign(self, names: tuple[str, ...]) -> None:
        """Let only the nodes `names` work for the run from now on; without any, the run is paused."""

    @abstractmethod
    def advance(self, is_delivering: Callable[[int], bool]) -> None:
        """Do what is due."""

    @abstractmethod
    def take_events(self) -> list[RunEvent]:
        """Return the events since the last call."""

    @abstractmethod
    def events_so_far(self) -> list[RunEvent]:
        """Return what a new subscriber needs: the plan, and how much is done."""

    @abstractmethod
    def admit(self, node: NodeRecord) -> None:
        """Let a member with a measured device prepare for the run or, if it is ready, work."""

    @abstractmethod
    def follow(self, kind: NodeEvent, reason: str, node: NodeRecord, *, is_lost: bool) -> None:
        """Record an event of a node; if the node is lost, continue without it."""

    @abstractmethod
    def retire(self, node: NodeRecord) -> None:
        """Give a node nothing new, because it is about to leave."""

    @abstractmethod
    def is_free(self, node: NodeRecord) -> bool:
        """Return whether the run waits for nothing that a node works on."""

    @abstractmethod
    def reject(self, node: NodeRecord, reason: str, error: EvenerError | None = None) -> None:
        """Continue without a node that cannot take part, because of `error` if one was raised there."""

    def disconnected(self, node: NodeRecord) -> None:  # noqa: B027  # only a run of ranks has something to do
        """Forget what was arriving over the node's connection."""

    @abstractmethod
    def stop(self, *, at_once: bool) -> None:
        """End the run at the user's request, after its step or at once."""

    @abstractmethod
    def result(self, error: EvenerError | None) -> RunResult:
        """Return what the run has produced."""


def result_of(error: EvenerError | None, record: bytes, weights: bytes | memoryview, note: str = "") -> RunResult:
    """Return the result of a run that ended with `error`; `note` is appended to the reason."""
    reason = shown(f"{error or ''}{note}")
    return RunResult(kind_of(error) if error else None, reason, record, weights)


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

    def end(self, header: RunFinished, buffers: Sequence[Buffer]) -> None:
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
