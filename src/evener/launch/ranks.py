"""Runs a program on one process a node of this machine, and relays what the ranks have to say.

Whichever way a run ends, this process names who failed first-hand: a rank that only lost its connection is not it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from evener.comm.signed_store import SignedStore
from evener.elastic.line import Line
from evener.errors import Interrupted, NodeLost
from evener.events import RunEvent, decode_events, encode_events
from evener.launch.elastic_ranks import ElasticRanks
from evener.launch.nodes import LocalNode
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.launch.rank_environment import Program, RankEnvironment, run_rank
from evener.launch.rank_heartbeat import RankHeartbeat, read_beat
from evener.launch.store import connect_store, keep_store, new_secret
from evener.record import Epoch, Event
from evener.signals import requests_to_stop, sigterm_is_ctrl_c

_HOST = "127.0.0.1"
_GRACE = 1.0
_BEGINNINGS = 3
"""Of a run that can go on without a node, at most: who is lost before the first step may be so each time."""
_LOOKING = timedelta(days=7)
"""That a user may take to look at the end of an epoch."""
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "evener.run.rank"]
_PRELOAD_ELASTIC = ["torch._dynamo"]
"""What DistributedDataParallel loads when it is made, in two seconds: a rank that comes later takes a tenth of one."""


def run_local(
    program: Program,
    nodes: Sequence[LocalNode],
    config: Any,
    *,
    patience: float,
    on_event: Callable[[RunEvent], object],
    is_elastic: bool = False,
) -> None:
    """Run `program` once a node, each in a process of its own, to the end.

    Args:
        program: module-level function of a rank's environment and `config`.
        nodes: one a rank.
        config: what to do; a plain value.
        patience: seconds of silence after which a rank is given up.
        on_event: called with everything of which a rank notifies; at the end of an epoch, whether the run ends there.
        is_elastic: whether the program can go on without a rank, and with another one in its place.

    Raises:
        EvenerError: of the rank that failed first-hand, with its exit code; all processes have ended by then.
        Interrupted: Ctrl-C; the ranks were asked to stop after their step and write a checkpoint.
        KeyboardInterrupt: Ctrl-C before the first step, or the program has no steps; all processes have ended.
    """
    preload = [*_PRELOAD, *(_PRELOAD_ELASTIC if is_elastic else ())]
    with sigterm_is_ctrl_c(), LocalProcesses(preload) as processes:
        for others in reversed(range(_BEGINNINGS if is_elastic else 1)):
            starter = RankStarter(processes, program, nodes, config, patience, is_elastic=is_elastic)
            lost = _run_once(processes, starter, nodes, patience, on_event, is_elastic)
            if lost is None:
                return
            if not others:
                raise lost
            on_event(Event(step=0, kind="begins again", message=f"before the first step {lost}"))


def _run_once(
    processes: LocalProcesses,
    starter: RankStarter,
    nodes: Sequence[LocalNode],
    patience: float,
    on_event: Callable[[RunEvent], object],
    is_elastic: bool,
) -> NodeLost | None:
    """A run to its end; or who was lost before the first step, so that nothing is lost if it begins again."""
    ranks, store = [starter.start(rank, rank) for rank in range(len(nodes))], starter.store
    elastic = ElasticRanks(ranks, nodes, patience, starter.start) if is_elastic else None

    def has_begun() -> bool:
        is_governed = elastic is not None and elastic.has_begun
        return is_governed or any(read_beat(store, rank)[1] for rank in range(len(nodes)))

    was_stopped = _relay(processes, ranks, partial(show_event, store, on_event), patience, elastic, has_begun)
    try:
        raise_first(ranks, store, nodes, was_stopped, elastic)
    except NodeLost as lost:
        if was_stopped or elastic is None or has_begun():
            raise
        for rank in ranks:
            processes.end(rank)
        return lost
    return None


class RankStarter:
    """Starts ranks of one run, which find each other in a store of its own on the loopback interface.

    Args:
        processes: in which they run.
        program, nodes, config, patience, is_elastic: see `run_local`.

    Attributes:
        store: of the run.
    """

    def __init__(
        self,
        processes: LocalProcesses,
        program: Program,
        nodes: Sequence[LocalNode],
        config: Any,
        patience: float,
        *,
        is_elastic: bool = False,
    ) -> None:
        secret = new_secret()
        self.store, port = keep_store(_HOST, 0, secret)
        place = partial(connect_store, _HOST, port, secret, patience=patience)
        self._arguments = (list(nodes), config, place, patience)
        self._processes, self._program, self._nodes, self._is_elastic = processes, program, nodes, is_elastic

    def start(self, rank: int, number: int) -> LocalProcess:
        """The process of `rank`, which in an elastic run has this number."""
        node, own = self._nodes[rank], number if self._is_elastic else None
        words = (self._program, rank, *self._arguments, own)
        return self._processes.start(node.name, _be_rank, *words, cores=node.cores, threads=node.threads)


def _be_rank(
    parent: Parent,
    program: Program,
    rank: int,
    nodes: list[LocalNode],
    config: Any,
    open_store: Callable[[], SignedStore],
    patience: float,
    number: int | None,
) -> None:
    """What a rank's process runs; with a `number`, that of an elastic run, which may have begun without it."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    env = RankEnvironment(
        rank=rank,
        nodes=nodes,
        device=torch.device(nodes[rank].device),
        patience=patience,
        notify=lambda event: parent.send(encode_events([event])),
        store=open_store(),
    )
    env.end = parent.end
    env.answer = partial(_answer, env.store)
    env.stop_on(signal.SIGTERM)
    if number is not None:
        env.line = _line_to(parent, env, number, open_store)
    if env.line is None or not env.line.is_late:
        env.heartbeat = RankHeartbeat(
            open_store(),
            rank=rank,
            nodes=env.names,
            patience=patience,
            on_lost=lambda sentence: env.end(NodeLost(sentence)),
        )
    run_rank(env, program, config)


def show_event(store: Any, on_event: Callable[[RunEvent], object], event: RunEvent) -> None:
    """Show an event; what comes back at the end of an epoch is left in the store, where the leader waits for it."""
    said = on_event(event)
    if isinstance(event, Epoch):
        store.set(_end_of(event), "over" if said else "on")


def _answer(store: Any, epoch: Epoch) -> bool:
    """What the process that started this one says to the end of `epoch`, however long it looks at it."""
    store.wait([_end_of(epoch)], _LOOKING)
    return bool(store.get(_end_of(epoch)) == b"over")


def _end_of(epoch: Epoch) -> str:
    return f"epoch/{epoch.epoch}"


def _line_to(parent: Parent, env: RankEnvironment, number: int, open_store: Callable[[], SignedStore]) -> Line:
    """To the authority, which is the parent."""
    return Line(
        process=number,
        node=env.node.name,
        is_late=number >= len(env.nodes),
        send=parent.say,
        receive=parent.hear,
        open_store=open_store,
        end=parent.end,
        patience=env.patience,
    )


def _relay(
    processes: LocalProcesses,
    ranks: Sequence[LocalProcess],
    show: Callable[[RunEvent], None],
    patience: float,
    elastic: ElasticRanks | None,
    has_begun: Callable[[], bool],
) -> bool:
    """Pass on what the ranks say until all have ended, or had the time for it. Whether they were asked to stop."""
    deadline: float | None = None
    was_stopped = False
    with requests_to_stop() as requests:
        while not all(rank.has_ended and rank.is_silent for rank in _needed(ranks, elastic)):
            gone = [rank for rank in ranks if rank.has_ended]  # of these, nothing is left to be read below
            for rank, data in processes.receive(timeout=0.2):
                if elastic is None or elastic.may_speak(rank):
                    for event in decode_events(data):
                        show(event)
            if elastic is not None:
                elastic.govern()
            failed = [rank for rank in ranks if (rank.failure or rank in gone) and _has_failed(rank, elastic)]
            if failed and deadline is None:
                is_own = any(rank.failure and rank.failure.is_own for rank in failed)
                deadline = time.monotonic() + (patience if was_stopped else _GRACE) * (0.5 if is_own else 1.0)
            if deadline is not None and time.monotonic() > deadline:
                break
            if len(requests) > 1:
                raise Interrupted("stopped at once; the last checkpoint is kept")
            if requests and not was_stopped:
                if not has_begun():
                    raise KeyboardInterrupt
                was_stopped, deadline = True, time.monotonic() + max(patience, _GRACE)
                if elastic is not None:
                    elastic.is_stopping = True
                processes.request_stop()
        else:
            if elastic is not None:
                elastic.govern()  # of those who ended since it last did, it may be that nobody is left
    return was_stopped


def _needed(ranks: Sequence[LocalProcess], elastic: ElasticRanks | None) -> list[LocalProcess]:
    """Those that the run depends on."""
    return [rank for rank in ranks if elastic is None or elastic.is_needed(rank)]


def _has_failed(rank: LocalProcess, elastic: ElasticRanks | None) -> bool:
    """Whether the run fails with this process."""
    return rank.has_failed if elastic is None else elastic.ends_the_run(rank)


def raise_first(
    ranks: Sequence[LocalProcess],
    store: Any,
    nodes: Sequence[LocalNode],
    was_stopped: bool,
    elastic: ElasticRanks | None,
) -> None:
    """Raise what explains the end of the run best: an own failure, then a death, then a lost connection."""
    failures = [rank.failure for rank in ranks if rank.failure is not None and _has_failed(rank, elastic)]
    own = [failure for failure in failures if failure.is_own]
    if own:
        raise own[0].as_error()
    for i, rank in enumerate(ranks):
        if _has_failed(rank, elastic) and rank.failure is None:
            raise NodeLost(f"node {nodes[i].name} (rank {i}) {rank.ending} at step {read_beat(store, i)[1]}")
    if failures:
        raise failures[0].as_error()
    if was_stopped and not all(rank.has_finished for rank in ranks):
        raise Interrupted("stopped; a rank did not end in time, the last checkpoint is kept")
