"""An elastic run whose processes are threads: nodes are killed in the middle of a step, others come."""

from __future__ import annotations

import gc
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.membership.control_channel import ControlChannel
from evener.membership.coordinator import Coordinator
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import (
    Beat,
    Generation,
    Heard,
    Hello,
    Participant,
    decode_for_coordinator,
    encode_message,
)
from evener.membership.rendezvous import Connections, Rendezvous
from evener.records.errors import NodeLost
from evener.records.history import History
from evener.records.plan import Plan
from evener.training.context import RankContext, make_context
from evener.training.elastic.divided import DividedElasticLoop
from evener.training.elastic.replicated import ReplicatedElasticLoop
from evener.training.loop import Loop
from evener.training.planning import Shape, divide
from evener.training.session import TrainingSession
from evener.training.training import Training, make_training
from support.commands import TINY
from support.stores import memory_store

PATIENCE = 20.0
MEETING_SECONDS = 8.0
"""For which a rank waits for others that went on without it: in processes, it is left waiting."""
_WAIT = 2.0
"""Seconds for which a model that does not fit any more waits for others."""
_SEEDED = threading.Lock()


class Killed(Exception):
    """The process of a node is killed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A node that is killed.

    Attributes:
        node: its number; of a process that came later, the number of that.
        step: in which it is killed.
        place: `loss`: before gradients are complete; `update`: when all ranks know that theirs are; `between`: when
            one of the others has heard that of it; `late`: when another one has made the update; `torn`: likewise, but
            it is not killed, and does not make it either.
        returns: whether another process takes its place.
        by: name of the node of that process, if it is a new one.
    """

    node: int
    step: int
    place: str = "loss"
    returns: bool = False
    by: str = ""


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        weights: of the whole model.
        history: of the run.
        nodes: of the last generation.
    """

    weights: dict[str, Tensor]
    history: History
    nodes: Sequence[str]


def settings(folder: Path, *, norm: bool = True, **more: Any) -> RunConfig:
    """Of a run of the tiny task in float64, with BatchNorm or without."""
    option = {"samples": "60", "schedule": "true", "norm": str(norm).lower()}
    chosen: dict[str, Any] = {"option": option, "epochs": 3, "precision": "fp64", **more}
    return RunConfig(task=TINY, output=folder, elastic=True, **chosen)


def serial_weights(config: RunConfig) -> dict[str, Tensor]:
    """What one process trains."""
    alone = RankEnvironment(
        rank=0, nodes=[NodeSpec(name="alone")], device=torch.device("cpu"), patience=PATIENCE, notify=lambda _: None
    )
    context = make_context(alone, _group(0, ["alone"], is_elastic=False), config)
    plan = divide(Shape("data", ((0,),), 1, context.batch_size, [1.0]), alone.nodes, (), context.batch_size)
    training = make_training(context, plan, config, is_predicted=False)
    Loop(training, config).run()
    return training.model.gather_weights()


class ElasticThreads:
    """A run of `rows` of nodes by `strategy`, with `faults`.

    Args:
        config: of the run.
        strategy: by which they divide.
        rows: the nodes of every replica.
        faults: in order.
        rates: of the nodes' lines, by which sums of gradients are divided; empty for rings.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: str,
        rows: Sequence[Sequence[int]],
        faults: Sequence[Fault],
        rates: Sequence[float] = (),
    ) -> None:
        self.config, self._faults = config, faults
        size = sum(map(len, rows))
        self.nodes = [NodeSpec(name=f"n{i}") for i in range(size)]
        shares = [1.0 + 0.5 * (i % 2) for i in range(size)]
        micro = config.micro_batches or 1
        shape = Shape(strategy, tuple(map(tuple, rows)), micro, 10 // micro, shares)
        lines = dict(zip([node.name for node in self.nodes], rates, strict=False))
        self.plan: Plan = msgspec.structs.replace(divide(shape, self.nodes, (), 10), line_rates=lines)
        self.store = memory_store()
        self.coordinator = Coordinator(PATIENCE)
        self._lock = threading.Lock()
        self._lives: dict[int, _Life] = {}
        self._told: set[int] = set()
        self.outcomes: list[Outcome] = []
        self.errors: list[BaseException] = []

    def run(self, seconds: float = 60.0) -> Outcome:
        """The run to its end."""
        deadline = time.monotonic() + seconds
        try:
            for number in range(len(self.nodes)):
                self._begin(number, number)
            while not self._is_over() and not self.errors:
                assert time.monotonic() < deadline, "the run hangs"
                self._govern()
                time.sleep(0.002)
        finally:
            left = [one for life in self._lives.values() for one in life.hang_up()]
            deadline = time.monotonic() + 10
            while (left := [one for one in left if not one.has_ended()]) and time.monotonic() < deadline:
                gc.collect()  # models of steps that were broken off refer to groups that others wait for
                time.sleep(0.01)
        while _is_connecting() and time.monotonic() < deadline + MEETING_SECONDS:
            time.sleep(0.01)
        if self.errors:
            raise self.errors[0]
        return self.outcomes[0]

    def _is_over(self) -> bool:
        """Whether all have ended but those who came too late to take part; the parent of real processes ends these."""
        is_done = any(life.has_finished for life in self._lives.values())
        return all(
            life.has_ended or (is_done and not self.coordinator.holds_state(process))
            for process, life in self._lives.items()
        )

    def _begin(self, process: int, node: int, new: str = "") -> None:
        life = self._lives[process] = _Life(self, process, node, new)
        threading.Thread(target=life.live, name=f"process {process}", daemon=True).start()

    def _govern(self) -> None:
        now = time.monotonic()
        for process, life in list(self._lives.items()):
            while not life.said.empty():
                message = decode_for_coordinator(life.said.get())
                if isinstance(message, Hello):
                    self.coordinator.arrive(process, message, now)
                elif isinstance(message, Beat):
                    self.coordinator.hear(process, message)
                    life.heard.put(encode_message(Heard(count=message.count)))
            if life.was_killed and not self.coordinator.is_lost(process):
                self.coordinator.lose(process, "was killed")
                if life.fault is not None and life.fault.returns:
                    self._begin(max(self._lives) + 1, life.node, life.fault.by)
        for process in self._lives:
            self.coordinator.reach(process, self.coordinator.to_reach(process))
        if not any(life.has_finished for life in self._lives.values()):
            generation = self.coordinator.decide(now)
            if generation is not None:
                self._announce(generation)

    def _announce(self, generation: Generation) -> None:
        present = {one.process for one in generation.participants}
        for process in self._told | present:
            self._lives[process].heard.put(encode_message(generation))
        self._told = present

    def wait_for_step(self, step: int) -> None:
        """Return when a rank has made `step`."""
        deadline = time.monotonic() + 10
        while all(life.last_step < step for life in self._lives.values()):
            assert time.monotonic() < deadline, f"nobody makes step {step}"
            time.sleep(0.001)

    def wait_for_returned(self, step: int) -> None:
        """Return when those take part again who died before `step`: a run may be over sooner than they come."""
        deadline = time.monotonic() + 20
        returning = [fault.node for fault in self._faults if fault.returns and fault.step + 3 <= step]
        while not all(map(self._is_back, returning)) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _is_back(self, node: int) -> bool:
        came = [(process, life) for process, life in list(self._lives.items()) if process >= len(self.nodes)]
        return any(life.node == node and (process in self._told or life.was_killed) for process, life in came)

    def fault_of(self, process: int) -> Fault | None:
        """What will befall this process."""
        return next((one for one in self._faults if one.node == process), None)


class _Life:
    """A process of a node, or of a new one in its place, in a thread."""

    def __init__(self, run: ElasticThreads, process: int, node: int, new: str) -> None:
        self._run, self.process, self.node, self._is_late = run, process, node, process >= len(run.nodes)
        self._nodes = [NodeSpec(name=new) if new and i == node else one for i, one in enumerate(run.nodes)]
        self._name = self._nodes[node].name
        self.said: SimpleQueue[bytes] = SimpleQueue()
        self.heard: SimpleQueue[bytes | None] = SimpleQueue()
        self.has_ended = self.has_finished = self.was_killed = False
        self.fault = run.fault_of(process)
        self.ranks: ElasticGroup | None = None
        self.opened: list[Connections] = []
        self._loop: Any = None

    @property
    def last_step(self) -> int:
        """That it has made; 0 before the first."""
        return 0 if self._loop is None or self._loop._loop is None else int(self._loop._loop.last)

    def live(self) -> None:
        """From its beginning to its end."""
        try:
            context = self._context()
            ranks = self.ranks = ElasticGroup(self._line(), context.group, "127.0.0.1")
            loop = self._loop = self._made(context, ranks)
            self._arm(loop)
            loop.run(self._finish)
        except Killed:
            assert self.ranks is not None
            self.ranks._abort_all(NodeLost("killed"))
            self.was_killed = True
        except BaseException as error:
            self._run.errors.append(error)
        self.has_ended = True

    def _made(self, context: RankContext, ranks: ElasticGroup) -> Any:
        """The loop of a process."""
        run = self._run
        if run.plan.strategy == "data":
            with _SEEDED:
                training = make_training(context, run.plan, run.config, is_predicted=False)
                return ReplicatedElasticLoop(training, run.config, ranks, self._is_late)
        if self._is_late:
            own, place = self._name, run.plan.assignments[self.node]
            came = None if own == place.node else msgspec.structs.replace(place, node=own, samples=0)
            return DividedElasticLoop(context, run.plan, run.config, ranks, None, came)
        training = make_training(context, run.plan, run.config, is_predicted=False)
        among = self._context(context.group)  # whose model was not taken over
        return DividedElasticLoop(among, run.plan, run.config, ranks, training)

    def hang_up(self) -> list[Connections]:
        """Abort what it had opened, which has to be closed."""
        self.heard.put(None)
        if self.ranks is not None:
            self.ranks._abort_all(NodeLost("the run is over"))
            self.opened += [self.ranks._connections, *self.ranks._abandoned]
        for connections in self.opened:
            connections.abort(RuntimeError("the run is over"))
        return self.opened

    def _arm(self, loop: Any) -> None:
        """Let the fault come."""
        before, fault = getattr(loop, "_before_update", loop._membership.fence), self.fault

        def before_update() -> None:
            if loop._loop is not None:
                self._run.wait_for_returned(loop._loop.last + 1)
            is_now = fault is not None and loop._loop is not None and loop._loop.last + 1 == fault.step
            if is_now and fault is not None and fault.place == "between":
                _tell_one_that_all_is_complete(loop._group)
                self._run.wait_for_step(fault.step)
            if is_now and fault is not None and fault.place in ("loss", "between"):
                raise Killed
            before()
            if is_now and fault is not None and fault.place in ("late", "torn"):
                self._run.wait_for_step(fault.step)
            if is_now:
                raise NodeLost("others are gone") if fault is not None and fault.place == "torn" else Killed

        loop._before_update = before_update
        if loop._loop is not None:
            loop._loop._fence = before_update

    def _finish(self, training: Training, session: TrainingSession, _: RunConfig) -> None:
        weights = training.model.gather_weights()
        if training.group.is_leader:
            self._run.outcomes.append(Outcome(weights, session.history, list(training.group.nodes)))
        self.has_finished = True

    def _context(self, group: Group | None = None) -> RankContext:
        run = self._run
        env = RankEnvironment(
            rank=self.node, nodes=self._nodes, device=torch.device("cpu"), patience=_WAIT, notify=lambda _: None,
            store=run.store,
        )  # fmt: skip
        if group is None:
            group = self._initial_group() if not self._is_late else _group(0, [self._name])
        with _SEEDED:  # DistributedDataParallel knows no groups of threads
            return replace(make_context(env, group, run.config), uses_all=False)

    def _initial_group(self) -> Group:
        """Before the first generation."""
        run = self._run
        present = tuple(Participant(process=i, node=one.name, since=0) for i, one in enumerate(run.nodes))
        generation = Generation(number=0, participants=present, reason="", is_urgent=False)
        changed = threading.Condition()
        rendezvous = Rendezvous(generation, self.process, lambda: run.store, "127.0.0.1", changed)
        with changed:
            changed.wait_for(lambda: rendezvous.has_ended, 20)
        assert rendezvous.connections is not None
        group, met = _group(self.process, generation.nodes), rendezvous.connections
        self.opened.append(met)
        group.become(self.process, generation.nodes, met.mesh, met.reports, met.sums)
        return group

    def _line(self) -> ControlChannel:
        return ControlChannel(
            process=self.process, node=self._name, is_late=self._is_late, send=self.said.put,
            receive=self._receive, open_store=lambda: self._run.store, end=lambda _: None, patience=PATIENCE,
        )  # fmt: skip

    def _receive(self) -> bytes:
        data = self.heard.get()
        if data is None:
            raise EOFError
        return data


def _is_connecting() -> bool:
    return any(thread.name == "evener-elastic-rendezvous" for thread in threading.enumerate())


def _tell_one_that_all_is_complete(group: Group) -> None:
    """A part of a barrier: all hear how long the message is, one hears it."""
    assert group.mesh is not None
    group.mesh.send(struct.pack("<I", 1))
    group.mesh.receive()
    group.mesh.send_to(min(group.mesh.peers), b".")


def _group(rank: int, nodes: Sequence[str], *, is_elastic: bool = True) -> Group:
    device = torch.device("cpu")
    return Group(
        rank=rank, size=len(nodes), device=device, nodes=list(nodes), timer=StepTimer(device), is_elastic=is_elastic
    )
