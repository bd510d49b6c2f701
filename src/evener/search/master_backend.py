"""Trials as runs of a master, on nodes that have joined it. Weights, optimiser and the place in the data stay there.

    start     a run of the trial is submitted on these nodes; the one that rests there goes on with them
    answer    is it over, the run rests: without nodes, it loses nothing
    forget    it is stopped
    receive   ends of epochs; how runs ended; whose nodes are gone

A node that is killed costs what it had begun; a master that is killed, what it had not written down. A search that is
killed finds its runs again by their names, which `runs.json` in the study's folder has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from msgspec.structs import replace

from evener.config.run_config import RunConfig
from evener.launch.nodes import LocalNode
from evener.ps.client import MasterClient
from evener.ps.node.engine import ModelBackend
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Header, RunEvents, RunFinished, RunRejected, StopRun
from evener.ps.protocol.status import NodeStatus, RunStatus
from evener.records.errors import EvenerError, InvalidInput, NodeLost, NoUsableNode
from evener.records.events import RunEvent, decode_events
from evener.records.record import Epoch
from evener.search.local_backend import RunEnd
from evener.search.placement import TrialNode
from evener.search.run_names import RunNames
from evener.wire.errors import ConnectionLost
from evener.wire.frame import Frame

WEIGHTS = "model.safetensors"
_APART = 1.0
"""Seconds between looks at who is here."""
_AWAY_LOOKS = 3
"""At nodes whose connection broke: then their trial goes on elsewhere. Whom a new master awaits has longer."""


class Submittable(NamedTuple):
    """A trial as it is submitted.

    Attributes:
        job: but for its name and nodes.
        blobs: that travel.
        backend: has the first weights, and writes the last ones.
    """

    job: Job
    blobs: list[Blob]
    backend: ModelBackend


class _Running(NamedTuple):
    """A trial that nodes work on."""

    nodes: tuple[str, ...]
    config: RunConfig
    backend: ModelBackend


class MasterRuns:
    """See `Runs`; close it.

    Args:
        client: of the master.
        folder: of the study.
        prepare: makes a trial's run ready to be submitted, which several nodes share or do not.
        notify: tells the user.
        clock: seconds.
    """

    def __init__(
        self,
        client: MasterClient,
        folder: Path,
        prepare: Callable[[RunConfig, bool], Submittable],
        notify: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client, self._prepare, self._notify, self._clock = client, prepare, notify, clock
        self._names = RunNames(folder)
        self._running: dict[int, _Running] = {}
        self._resting: set[int] = set()
        self._said: deque[tuple[int, RunEvent | RunEnd]] = deque()
        self._here: list[LocalNode] = []
        self._away: dict[str, int] = {}
        self._fastest, self._due, self._is_waiting = 0.0, 0.0, False
        self._persist(self._take_over)

    def nodes(self) -> Sequence[TrialNode]:
        """See `Runs`."""
        if self._clock() >= self._due:
            self._persist(self._look)
        return self._here

    def start(self, number: int, nodes: Sequence[str], config: RunConfig) -> None:
        """See `Runs`."""
        try:
            found = self._prepare(config, len(nodes) > 1)
        except EvenerError as error:  # of the task with these options
            self._said.append((number, RunEnd(error)))
            return
        try:
            self._persist(lambda: self._place(number, tuple(nodes), found))
        except InvalidInput as error:  # of the master: another run has a node by now
            self._due = 0.0
            self._said.append((number, RunEnd(error, is_refused=True)))
            return
        self._running[number] = _Running(tuple(nodes), config, found.backend)
        self._resting.discard(number)

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """See `Runs`: what is over rests; after its last epoch a run ends by itself, and has weights to bring."""
        run = self._running.get(number)
        if is_over and run is not None and isinstance(event, Epoch) and event.epoch + 1 < (run.config.epochs or 0):
            self._rest(number, None)

    def stop(self, number: int) -> None:
        """See `Runs`."""
        if number in self._running:
            self._rest(number, None)

    def forget(self, number: int) -> None:
        """See `Runs`."""
        name = self._names.of(number)
        if number in self._resting and name is not None:
            self._resting.discard(number)
            self._persist(lambda: self._client.change(StopRun(run=name)))

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """See `Runs`."""
        self.nodes()
        self._persist(lambda: self._hear(0.0 if self._said else timeout))
        found = list(self._said)
        self._said.clear()
        return found

    def close(self) -> None:
        """Have the nodes be free for others: what was not forgotten rests, until the search is gone on with."""
        for number in list(self._running):
            self._rest(number, None)

    def _persist(self, act: Callable[[], object]) -> None:
        """Do something, also if the master is killed meanwhile and comes back. Raises NodeLost: it does not."""
        while True:
            try:
                act()
                return
            except ConnectionLost as error:
                self._notify(f"{error}; looking for the master")
                names = [name for number in self._running if (name := self._names.of(number))]
                self._client.find_again(names, error)
                self._notify("the master is there again")

    def _take_over(self) -> None:
        """Have the runs rest that an earlier process of this search left going on, and stop those it did not note."""
        for run in self._own(self._client.ask().runs):
            number = self._names.number_of(run.run)
            if number is None:
                self._client.change(StopRun(run=run.run))
            else:
                self._client.assign(run.run, ())
                self._resting.add(number)

    def _own(self, runs: Sequence[RunStatus]) -> list[RunStatus]:
        return [run for run in runs if self._names.is_own(run.run)]

    def _place(self, number: int, nodes: tuple[str, ...], found: Submittable) -> None:
        """Give the trial's run these nodes, and hear of all its epochs; submit it if the master has none."""
        active = {run.run for run in self._client.ask().runs}
        name = self._names.of(number) or self._names.wanted(number)
        if name in active:
            self._client.assign(name, nodes)
            self._client.follow([name])
        else:
            job = replace(found.job, run=self._names.wanted(number), nodes=nodes)
            name = self._client.submit(job, found.backend.initial_weights(), found.blobs)
        self._names.note(number, name)

    def _rest(self, number: int, error: EvenerError | None) -> None:
        """Take the nodes away from a trial's run, which is over for now."""
        del self._running[number]
        self._resting.add(number)
        self._persist(lambda: self._take_nodes(number))
        self._said.append((number, RunEnd(error)))

    def _take_nodes(self, number: int) -> None:
        name = self._names.of(number)
        if name in {run.run for run in self._client.ask().runs}:
            self._client.assign(name, ())

    def _hear(self, timeout: float) -> None:
        frame = self._client.news(timeout)
        while frame is not None:
            self._heard(frame)
            frame = self._client.news(0.0)

    def _heard(self, frame: Frame[Header]) -> None:
        header = frame.header
        assert isinstance(header, RunEvents | RunFinished | RunRejected)
        number = self._names.number_of(header.run)
        if number is None or number not in self._running:
            return
        if isinstance(header, RunEvents):
            self._said += [(number, event) for event in decode_events(frame.buffers[0]) if isinstance(event, Epoch)]
            return
        run = self._running.pop(number)
        if isinstance(header, RunRejected):
            lost = NodeLost(f"the master does not know its run any more ({header.reason}), which begins anew")
            self._said.append((number, RunEnd(lost)))
        elif header.kind is not None:
            error = header.kind.as_error(header.reason)
            self._said.append((number, RunEnd(error, of_node=isinstance(error, NoUsableNode))))
        else:
            run.backend.write_weights(bytes(frame.buffers[1]), run.config.folder / WEIGHTS)
            self._said.append((number, RunEnd(None)))

    def _look(self) -> None:
        """See who is here, and for which trials nobody is any more."""
        status = self._client.ask()
        self._due = self._clock() + _APART
        others = [run for run in status.runs if not self._names.is_own(run.run)]
        free = [node for node in status.nodes if not any(run.nodes is None or node.name in run.nodes for run in others)]
        self._fastest = max([self._fastest, *(node.score or 0.0 for node in free)])
        self._here = [self._node_of(node) for node in free if node.state == "present" and node.score]
        if not self._here and not self._is_waiting:
            self._notify("waiting for nodes: none is here that works for nobody else")
        self._is_waiting = not self._here
        self._find_lost(status.nodes)

    def _node_of(self, node: NodeStatus) -> LocalNode:
        speed = (node.score or 0.0) / self._fastest
        return LocalNode(name=node.name, host=node.address, device=node.device, speeds=((0, speed),))

    def _find_lost(self, nodes: Sequence[NodeStatus]) -> None:
        states = {node.name: node.state for node in nodes}
        away = [name for name, state in states.items() if state == "away"]
        self._away = {name: self._away.get(name, 0) + 1 for name in away}
        for number, run in list(self._running.items()):
            gone = [name for name in run.nodes if states.get(name, "left") in ("benched", "left")]
            gone += [name for name in run.nodes if self._away.get(name, 0) >= _AWAY_LOOKS]
            if len(gone) == len(run.nodes):
                self._rest(number, NodeLost(f"node {', '.join(gone)} is gone", gone))
