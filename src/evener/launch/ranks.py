"""A run of a program in one process per local node, and the relay of its events.

However a run ends, this process names the rank that failed itself, not a rank that only lost its connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from evener.comm.signed_store import SignedStore
from evener.launch.nodes import NodeSpec
from evener.launch.processes import RANK_MODULES, LocalProcess, LocalProcesses
from evener.launch.rank_environment import RankFunction
from evener.launch.rank_heartbeat import has_left, read_beat
from evener.launch.rank_starter import RankStarter, show_event
from evener.membership.rank_supervisor import RankSupervisor
from evener.records.errors import DeviceLost, Interrupted, NodeLost
from evener.records.events import Phase, RunEvent, decode_events
from evener.records.record import Event, Step
from evener.system.heartbeat import ListenedSeconds, Progress
from evener.system.signals import interrupt_on_stop_signals, requests_to_stop

_GRACE = 1.0
_STOPPING = Phase(
    what="stopping", detail="after the step, validation or checkpoint in progress; Ctrl-C ends it at once"
)
_MAX_STARTS = 3
"""Number of starts on the same nodes: a node that is lost before the first step may be lost each time."""
Without = Callable[[Any, Sequence[int], Event], Any]
"""A function of config, remaining positions and event; returns the config of these nodes, or None to end the run."""


def run_local(
    program: RankFunction,
    nodes: Sequence[NodeSpec],
    config: Any,
    *,
    patience: float,
    on_event: Callable[[RunEvent], object],
    is_elastic: bool = False,
    without: Without | None = None,
) -> None:
    """Run `program` to the end, in one process per node.

    Args:
        program: module-level function of a rank's environment and `config`.
        nodes: one per rank.
        config: argument of the program; a plain value.
        patience: seconds of silence after which a rank is lost.
        on_event: called with every event of a rank; for the end of an epoch it returns whether the run ends there.
        is_elastic: whether the program can continue without a rank, and with a replacement.
        without: returns the config with which the remaining nodes restart if the ranks cannot continue themselves. A
            node that is lost before the first step has three tries.

    Raises:
        EvenerError: error of the rank that failed itself, with its exit code; all processes have ended.
        Interrupted: Ctrl-C; the ranks were asked to stop after their step and write a checkpoint.
        KeyboardInterrupt: Ctrl-C before the first step, or the program has no steps; all processes have ended.
    """
    with interrupt_on_stop_signals(), LocalProcesses(RANK_MODULES) as processes:
        starts = _MAX_STARTS if is_elastic else 0
        while True:
            starter = RankStarter(processes, program, nodes, config, patience, is_elastic=is_elastic)
            loss = _run_once(processes, starter, nodes, patience, on_event, is_elastic)
            if loss is None:
                return
            starts -= 1
            if starts > 0 and not loss.has_trained:
                on_event(Event(step=0, kind="begins again", message=f"before the first step {loss.error}"))
                continue
            remaining = [rank for rank in range(len(nodes)) if rank not in loss.ranks]
            names = tuple(nodes[rank].name for rank in loss.ranks)
            event = Event(step=loss.step, kind="node lost", message=f"{loss.error}; the others go on", nodes=names)
            instead = None if without is None or not remaining or not names else without(config, remaining, event)
            if instead is None:
                raise loss.error
            on_event(event)
            nodes, config = [nodes[rank] for rank in remaining], instead


class _Loss(NamedTuple):
    """Lost nodes that ended their run.

    Attributes:
        error: for the user.
        ranks: lost ranks; empty if no rank can continue.
        step: last step of the ranks.
        has_trained: whether there was a step.
    """

    error: NodeLost
    ranks: list[int]
    step: int
    has_trained: bool


def _run_once(
    processes: LocalProcesses,
    starter: RankStarter,
    nodes: Sequence[NodeSpec],
    patience: float,
    on_event: Callable[[RunEvent], object],
    is_elastic: bool,
) -> _Loss | None:
    """Run once; return the loss if nodes were lost, after all processes have ended."""
    ranks, store = [starter.start(rank, rank) for rank in range(len(nodes))], starter.store

    def notify(kind: str, message: str, node: str) -> None:
        on_event(Event(step=max(steps()), kind=kind, message=message, nodes=(node,)))

    supervisor = RankSupervisor(ranks, patience, starter.start, notify=notify) if is_elastic else None

    def steps() -> list[int]:
        return [read_beat(store, rank)[1] for rank in range(len(nodes))]

    def has_met() -> bool:
        return (supervisor is not None and supervisor.has_generation) or any(steps())

    def has_trained() -> bool:
        return (supervisor is not None and supervisor.has_trained) or any(steps())

    def show(event: RunEvent) -> object:
        if isinstance(event, Step):
            trained.append(event.step)
        return on_event(event)

    was_stopped, has_ended, trained = False, False, list[int]()
    lone = _LoneRank(ranks, store, patience, supervisor)
    try:
        shows = partial(show_event, store, show)
        was_stopped = _relay(processes, ranks, shows, patience, supervisor, has_met, lone)
        has_ended = True
        raise_first(ranks, store, nodes, was_stopped, supervisor, max(trained, default=0))
    except NodeLost as error:
        if was_stopped or (supervisor is not None and supervisor.is_stopping):
            raise
        lost = _lost(ranks, nodes, error) if has_ended else []
        loss = _Loss(error, lost, max([*steps(), *trained]), bool(trained) or has_trained())
        for rank in ranks:
            processes.end(rank)
        return loss
    return None


class _LoneRank:
    """A check of the only rank that still runs: no other rank notices its silence.

    Args:
        ranks: the processes.
        store: of the run.
        patience: seconds of silence after which the rank is lost.
        supervisor: detects silent ranks itself once there is a generation; None if the run is not elastic.
    """

    def __init__(
        self,
        ranks: Sequence[LocalProcess],
        store: SignedStore,
        patience: float,
        supervisor: RankSupervisor[LocalProcess] | None,
    ) -> None:
        self._ranks, self._store, self._patience, self._supervisor = ranks, store, patience, supervisor
        self._listened = ListenedSeconds(patience, time.monotonic())
        self._progress = Progress(0.0)

    def look(self) -> None:
        """Kill the rank if it is silent; called several times within the patience."""
        if self._supervisor is not None and self._supervisor.has_generation:
            return
        running = [rank for rank, process in enumerate(self._ranks) if not process.has_ended]
        rank = running[0] if len(running) == 1 < len(self._ranks) else None
        count = 0 if rank is None else read_beat(self._store, rank)[0]
        is_expected = rank is not None and count > 0 and not has_left(self._store, rank)
        now = self._listened.at(time.monotonic())
        if self._progress.idle_seconds(count, expected=is_expected, now=now) > self._patience:
            self._ranks[running[0]].give_up(f"has been silent for {self._patience:g} s,")


def _lost(ranks: Sequence[LocalProcess], nodes: Sequence[NodeSpec], error: NodeLost) -> list[int]:
    """Return the ranks that ended without a report; else those that `error` names, or that are silent.

    A rank that was silent and continues reports itself that the others lost it.
    """
    silent = [i for i, rank in enumerate(ranks) if rank.failure is None and not rank.has_finished]
    named = [i for i, node in enumerate(nodes) if node.name in error.nodes]
    return [i for i in silent if ranks[i].has_ended] or named or silent


def _relay(
    processes: LocalProcesses,
    ranks: Sequence[LocalProcess],
    show: Callable[[RunEvent], None],
    patience: float,
    supervisor: RankSupervisor[LocalProcess] | None,
    has_met: Callable[[], bool],
    lone: _LoneRank,
) -> bool:
    """Relay events until all ranks have ended, or their time is over; return whether they were asked to stop.

    After a request to stop, a step, a validation or a checkpoint takes the time that it needs while all ranks are
    heard. Once a rank that still worked at the request has ended, the others have one patience.
    """
    deadline: float | None = None
    asked_at: float | None = None
    working: list[LocalProcess] = []
    is_told = False
    with requests_to_stop() as requests:
        while not all(rank.has_ended and rank.is_drained for rank in _needed(ranks, supervisor)):
            gone = [rank for rank in ranks if rank.has_ended]  # all their messages are read below
            for rank, data in processes.receive(timeout=0.2):
                if supervisor is None or supervisor.may_speak(rank):
                    for event in decode_events(data):
                        show(event)
            if supervisor is not None:
                supervisor.tick()
            lone.look()
            failed = [rank for rank in ranks if (rank.failure or rank in gone) and _has_failed(rank, supervisor)]
            if asked_at is not None:
                if deadline is None and (failed or any(rank.has_ended for rank in working)):
                    deadline = time.monotonic() + max(patience, _GRACE)
                if not is_told and time.monotonic() > asked_at + max(patience, _GRACE):
                    show(_STOPPING)
                    is_told = True
            elif failed and deadline is None:
                is_own = any(rank.failure and rank.failure.is_own for rank in failed)
                deadline = time.monotonic() + _GRACE * (0.5 if is_own else 1.0)
            if deadline is not None and time.monotonic() > deadline:
                break
            if len(requests) > 1:
                raise Interrupted("stopped at once; the last checkpoint is kept")
            if requests and asked_at is None:
                if not has_met():
                    raise KeyboardInterrupt
                asked_at, deadline = time.monotonic(), None
                working = [rank for rank in ranks if not rank.has_ended]  # one that is not needed may have ended
                if supervisor is not None:
                    supervisor.is_stopping = True
                processes.request_stop()
        else:
            if supervisor is not None:
                supervisor.tick()  # the ranks that ended since may have been the last ones
    return asked_at is not None


def _needed(ranks: Sequence[LocalProcess], supervisor: RankSupervisor[LocalProcess] | None) -> list[LocalProcess]:
    """Return the processes that the run depends on."""
    return [rank for rank in ranks if supervisor is None or supervisor.is_needed(rank)]


def _has_failed(rank: LocalProcess, supervisor: RankSupervisor[LocalProcess] | None) -> bool:
    """Whether the failure of this process ends the run."""
    return rank.has_failed if supervisor is None else supervisor.ends_the_run(rank)


def raise_first(
    ranks: Sequence[LocalProcess],
    store: Any,
    nodes: Sequence[NodeSpec],
    was_stopped: bool,
    supervisor: RankSupervisor[LocalProcess] | None,
    step: int = 0,
) -> None:
    """Raise the best explanation of the end.

    It is a failure of a rank itself, then a lost device, then a death, then a lost connection.

    `step` is the last that was shown; a rank with a coordinator sends no heartbeats with its step.
    """
    failures = [rank.failure for rank in ranks if rank.failure is not None and _has_failed(rank, supervisor)]
    direct = [failure for failure in failures if failure.is_own]
    if direct:
        raise direct[0].as_error()
    losses = [failure.as_error() for failure in failures]
    if device_loss := next((loss for loss in losses if isinstance(loss, DeviceLost)), None):
        raise device_loss
    for i, rank in enumerate(ranks):
        if _has_failed(rank, supervisor) and rank.failure is None:
            last = max(read_beat(store, i)[1], step)
            sentence = f"node {nodes[i].name} (rank {i}) {rank.ending} at step {last}"
            raise NodeLost(sentence, (nodes[i].name,))
    if losses:
        raise losses[0]
    if was_stopped and not all(rank.has_finished for rank in ranks):
        raise Interrupted("stopped; a rank did not end in time, the last checkpoint is kept")
