"""Trials as runs of a master, on nodes that have joined it. Weights, optimizer and data position stay at the master.

    start     submits a run of the trial on the given nodes, or assigns them to its suspended run
    answer    suspends the run if it is over: without nodes, it loses nothing
    forget    stops the run
    receive   returns ends of epochs, ends of runs, and losses of nodes

A run of an agreement is suspended at once; ranks that work together stop after a step, and have its checkpoint sent to
the master first. A killed node loses the step that it had begun, or what the ranks did after their last checkpoint; a
killed master loses what it had not written to disk. A killed search finds its runs again by the names in `runs.json` in
the study's folder.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from msgspec.structs import replace

from evener.agreements.layout import Flat
from evener.launch.nodes import NodeSpec
from evener.ps.client import MasterClient
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.job import AnyJob
from evener.ps.protocol.messages import Header, RunEvents, RunFinished, RunRejected, StopRun
from evener.ps.protocol.status import ClusterStatus, NodeStatus, RunStatus
from evener.records.atomic import atomic_write
from evener.records.errors import EvenerError, InvalidFile, InvalidInput, NodeLost, NoUsableNode
from evener.records.events import RunEvent, decode_events
from evener.records.record import Epoch
from evener.records.schema import Noun, RunName, encode_noun, read_noun
from evener.search.local_runner import RunEnd
from evener.search.placement import TrialNode
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Frame

_LOOK_INTERVAL_S = 1.0
"""Seconds between two queries of the master's nodes."""
_PAUSE_S = 0.2
_STOP_PATIENCES = 8
"""Patiences of the connection within which trials that an earlier process left running have to stop."""
_MAX_AWAY_LOOKS = 3
"""A trial moves to other nodes after this many queries in which its node's connection was broken. A node that a
restarted master expects back has longer.
"""


class Submittable(NamedTuple):
    """A trial, prepared for submission.

    Attributes:
        job: the job without its name and nodes.
        blobs: files that are sent with it.
        epochs: epochs of the trial unless it is pruned.
        initial_weights: returns the weights to begin with; None where the nodes make them.
        save: saves the resulting weights, a safetensors file.
    """

    job: AnyJob
    blobs: list[Blob]
    epochs: int
    initial_weights: Callable[[], Flat | None]
    save: Callable[[bytes], object]


class _ActiveRun(NamedTuple):
    """A trial that nodes work on."""

    nodes: tuple[str, ...]
    trial: Submittable


class MasterRunner:
    """Runs trials on a master's nodes, as `TrialRunner` describes; call `close` at the end.

    Args:
        client: client of the master.
        folder: folder of the study.
        prepare: prepares a trial's run for submission; its second argument says whether several nodes share it.
        notify: shows a message to the user.
        clock: returns seconds.
    """

    def __init__(
        self,
        client: MasterClient,
        folder: Path,
        prepare: Callable[[Any, bool], Submittable],
        notify: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client, self._prepare, self._notify, self._clock = client, prepare, notify, clock
        self._names = RunNames(folder)
        self._running: dict[int, _ActiveRun] = {}
        self._suspending: dict[int, EvenerError | None] = {}
        self._released: set[int] = set()
        self._last_epochs: dict[int, Epoch] = {}
        self._suspended: set[int] = set()
        self._events: deque[tuple[int, RunEvent | RunEnd]] = deque()
        self._present: list[NodeSpec] = []
        self._away: dict[str, int] = {}
        self._fastest, self._next_look, self._is_waiting = 0.0, 0.0, False
        self._retry(self._adopt_runs)

    def nodes(self) -> Sequence[TrialNode]:
        """Return the nodes that no other run of the master uses."""
        if self._clock() >= self._next_look:
            self._retry(self._look)
        elif self._suspending:
            self._retry(self._see_suspended)
        return self._present

    def start(self, number: int, nodes: Sequence[str], config: Any) -> None:
        """Submit the run of a trial on these nodes, or assign them to its suspended run."""
        try:
            submittable = self._prepare(config, len(nodes) > 1)
        except EvenerError as error:  # raised by the task with these options
            self._events.append((number, RunEnd(error)))
            return
        try:
            self._retry(lambda: self._assign_or_submit(number, tuple(nodes), submittable))
        except InvalidInput as error:  # raised by the master: another run uses a node by now
            self._next_look = 0.0
            self._events.append((number, RunEnd(error, is_refused=True)))
            return
        self._running[number] = _ActiveRun(tuple(nodes), submittable)
        self._suspended.discard(number)

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """Suspend a run that is over, except after its last epoch: it then ends by itself and returns its weights."""
        run = self._running.get(number)
        if is_over and run is not None and isinstance(event, Epoch) and event.epoch + 1 < run.trial.epochs:
            self._suspend(number, None)

    def stop(self, number: int) -> None:
        """Suspend the run of a trial."""
        if number in self._running:
            self._suspend(number, None)

    def forget(self, number: int) -> None:
        """Stop the suspended run of a trial at the master."""
        name = self._names.of(number)
        if number in self._suspended and name is not None:
            self._suspended.discard(number)
            self._retry(lambda: self._client.change(StopRun(run=name)))

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """Return the events and ends of runs since the last call."""
        self.nodes()
        self._retry(lambda: self._collect_messages(0.0 if self._events else timeout))
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Free the nodes: suspend all running trials until the search is resumed."""
        self._suspending |= dict.fromkeys(self._running)
        self._retry(self._release)

    def _retry(self, act: Callable[[], object]) -> None:
        """Call `act`, again if the master was restarted meanwhile. Raises NodeLost if it does not come back."""
        while True:
            try:
                act()
                return
            except ConnectionLost as error:
                self._notify(f"{error}; looking for the master")
                names = [name for number in self._running if (name := self._names.of(number))]
                self._client.find_again(names, error)
                self._released.clear()
                self._notify("reconnected to the master")

    def _adopt_runs(self) -> None:
        """Suspend the runs that an earlier process of this search left running, and stop those it did not record.

        Ranks that work together take a while to stop.
        """
        for run in self._own_runs(self._client.ask().runs):
            number = self._names.number_of(run.run)
            if number is None:
                self._client.change(StopRun(run=run.run))
                continue
            with suppress(InvalidInput):  # it has ended meanwhile
                self._client.assign(run.run, ())
            self._suspended.add(number)
        until = self._clock() + _STOP_PATIENCES * self._client.patience
        while any(run.nodes for run in self._own_runs(self._client.ask().runs)) and self._clock() < until:
            sleep(_PAUSE_S)

    def _own_runs(self, runs: Sequence[RunStatus]) -> list[RunStatus]:
        return [run for run in runs if self._names.is_own(run.run)]

    def _assign_or_submit(self, number: int, nodes: tuple[str, ...], submittable: Submittable) -> None:
        """Assign these nodes to the trial's run and follow it; submit it if the master has no such run."""
        active = {run.run for run in self._client.ask().runs}
        name = self._names.of(number) or self._names.proposed(number)
        if name in active:
            self._client.assign(name, nodes)
            self._client.follow([name])
        else:
            job = replace(submittable.job, run=self._names.proposed(number), nodes=nodes)
            name = self._client.submit(job, submittable.initial_weights(), submittable.blobs)
        self._names.record(number, name)

    def _suspend(self, number: int, error: EvenerError | None) -> None:
        """Release the nodes of a trial's run; its end is reported when they are free."""
        if number not in self._suspending:
            self._suspending[number] = error
            self._retry(self._see_suspended)

    def _release(self) -> None:
        """Pause the runs that are being suspended; the master, or its successor, does so once."""
        active = {run.run for run in self._client.ask().runs} if self._suspending.keys() - self._released else set()
        for number in self._suspending.keys() - self._released:
            if (name := self._names.of(number)) in active:
                with suppress(InvalidInput):  # it has ended meanwhile, which the master reports
                    self._client.assign(name, ())
            self._released.add(number)

    def _see_suspended(self) -> ClusterStatus:
        """Report the end of runs whose nodes are free by now; the master reports the end of those that are over.

        Return the state of the master.
        """
        self._release()
        status = self._client.ask()
        paused = {run.run for run in status.runs if run.nodes == ()}
        for number, error in list(self._suspending.items()):
            if self._names.of(number) in paused:
                self._end(number, RunEnd(error))
                self._suspended.add(number)
        return status

    def _end(self, number: int, end: RunEnd) -> None:
        self._running.pop(number, None)
        self._suspending.pop(number, None)
        self._last_epochs.pop(number, None)
        self._released.discard(number)
        self._events.append((number, end))

    def _collect_messages(self, timeout: float) -> None:
        frame = self._client.news(timeout)
        while frame is not None:
            self._handle(frame)
            frame = self._client.news(0.0)

    def _handle(self, frame: Frame[Header]) -> None:
        header = frame.header
        assert isinstance(header, RunEvents | RunFinished | RunRejected)
        number = self._names.number_of(header.run)
        if number is None or number not in self._running:
            return
        if isinstance(header, RunEvents):
            for event in decode_events(frame.buffers[0]):
                if isinstance(event, Epoch):
                    self._epoch_ended(number, event)
            return
        if isinstance(header, RunRejected):
            lost = NodeLost(f"the master has lost the trial's run ({header.reason}); the trial restarts")
            self._end(number, RunEnd(lost))
        elif header.kind is not None:
            error = header.kind.as_error(header.reason)
            self._end(number, RunEnd(error, of_node=isinstance(error, NoUsableNode)))
        else:
            self._complete(number, bytes(frame.buffers[1]))

    def _epoch_ended(self, number: int, epoch: Epoch) -> None:
        """Report the end of an epoch; that of the last one is reported when the resulting weights are saved here."""
        if epoch.epoch + 1 < self._running[number].trial.epochs:
            self._events.append((number, epoch))
        else:
            self._last_epochs[number] = epoch

    def _complete(self, number: int, weights: bytes) -> None:
        """Save the weights of a run that is complete, and report its last epoch and its end."""
        try:
            if not weights:
                raise NodeLost("the run ended without weights")
            self._running[number].trial.save(weights)
        except (EvenerError, OSError) as error:
            failure = error if isinstance(error, EvenerError) else InvalidFile(f"its results cannot be saved: {error}")
            self._end(number, RunEnd(failure))
            return
        if (last := self._last_epochs.get(number)) is not None:
            self._events.append((number, last))
        self._end(number, RunEnd(None))

    def _look(self) -> None:
        """Query which nodes are present, and report trials that are suspended or have lost all their nodes."""
        status = self._see_suspended()
        self._next_look = self._clock() + _LOOK_INTERVAL_S
        others = [run for run in status.runs if not self._names.is_own(run.run)]
        free = [node for node in status.nodes if not any(run.nodes is None or node.name in run.nodes for run in others)]
        self._fastest = max([self._fastest, *(node.score or 0.0 for node in free)])
        self._present = [self._node_of(node) for node in free if node.state == "present" and node.score]
        if not self._present and not self._is_waiting:
            self._notify("waiting for nodes: no node of the master is free")
        self._is_waiting = not self._present
        self._find_lost(status.nodes)

    def _node_of(self, node: NodeStatus) -> NodeSpec:
        speed = (node.score or 0.0) / self._fastest
        return NodeSpec(name=node.name, host=node.address, device=node.device, speeds=((0, speed),))

    def _find_lost(self, nodes: Sequence[NodeStatus]) -> None:
        states = {node.name: node.state for node in nodes}
        away = [name for name, state in states.items() if state == "away"]
        self._away = {name: self._away.get(name, 0) + 1 for name in away}
        running = [(number, run) for number, run in self._running.items() if number not in self._suspending]
        for number, run in running:
            gone = [name for name in run.nodes if states.get(name, "left") in ("excluded", "left")]
            gone += [name for name in run.nodes if self._away.get(name, 0) >= _MAX_AWAY_LOOKS]
            if len(gone) == len(run.nodes):
                self._suspend(number, NodeLost(f"node {', '.join(gone)} is lost", gone))


_FILE = "runs.json"


class StudyRuns(Noun, frozen=True, kw_only=True):
    """The content of `runs.json`.

    Attributes:
        prefix: prefix of the names of all runs.
        names: name of the last run of each trial, by its number, as text.
    """

    prefix: RunName
    names: dict[str, RunName] = {}


class RunNames:
    """The names of a study's runs at a master.

    Args:
        folder: folder of the study.

    Raises:
        InvalidInput: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        stored = read_noun(self._path, StudyRuns) if self._path.exists() else None
        self._prefix = stored.prefix if stored else f"tune-{secrets.token_hex(4)}"
        self._names = {int(number): name for number, name in stored.names.items()} if stored else {}
        if stored is None:
            self._save()

    def is_own(self, name: str) -> bool:
        """Return whether a run belongs to this study."""
        return name.startswith(f"{self._prefix}-")

    def proposed(self, number: int) -> str:
        """Return the name with which a trial's run is submitted; the master changes it if it is taken."""
        return f"{self._prefix}-{number:04d}"

    def of(self, number: int) -> str | None:
        """Return the name of a trial's run; None if it has none."""
        return self._names.get(number)

    def number_of(self, name: str) -> int | None:
        """Return the number of the trial of a run; None if the run is not recorded."""
        return next((number for number, known in self._names.items() if known == name), None)

    def record(self, number: int, name: str) -> None:
        """Record the name of a trial's run. Raises OSError."""
        if self._names.get(number) != name:
            self._names[number] = name
            self._save()

    def _save(self) -> None:
        names = {str(number): name for number, name in self._names.items()}
        atomic_write(self._path, encode_noun(StudyRuns(prefix=self._prefix, names=names)))
