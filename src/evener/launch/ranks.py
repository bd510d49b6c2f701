"""Runs a program on one process a node of this machine, and relays what the ranks have to say.

Whichever way a run ends, this process names who failed first-hand: a rank that only lost its connection is not it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import Interrupted, NodeLost
from evener.events import RunEvent, decode_events, encode_events
from evener.launch.nodes import LocalNode
from evener.launch.processes import LocalProcess, LocalProcesses, Parent
from evener.launch.rank_environment import Program, RankEnvironment, connect_store, run_rank
from evener.launch.rank_heartbeat import RankHeartbeat, read_beat
from evener.signals import requests_to_stop, sigterm_is_ctrl_c

_HOST = "127.0.0.1"
_GRACE = 1.0
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "evener.run.rank"]


def run_local(
    program: Program,
    nodes: Sequence[LocalNode],
    config: Any,
    *,
    patience: float,
    on_event: Callable[[RunEvent], None],
) -> None:
    """Run `program` once a node, each in a process of its own, to the end.

    Args:
        program: module-level function of a rank's environment and `config`.
        nodes: one a rank.
        config: what to do; a plain value.
        patience: seconds of silence after which a rank is given up.
        on_event: called with everything of which a rank notifies.

    Raises:
        EvenerError: of the rank that failed first-hand, with its exit code; all processes have ended by then.
        Interrupted: Ctrl-C; the ranks were asked to stop after their step and write a checkpoint.
    """
    with _store() as (store, port), sigterm_is_ctrl_c(), LocalProcesses(_PRELOAD) as processes:
        ranks = [
            processes.start(
                node.name, _be_rank, program, rank, list(nodes), config, port, patience,
                cores=node.cores, threads=node.threads,
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip
        was_stopped = _relay(processes, ranks, on_event, patience)
        _raise_first(ranks, store, nodes, was_stopped)


@contextlib.contextmanager
def _store() -> Iterator[tuple[Any, int]]:
    """A store that listens on the loopback interface only, and its port."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    yield store, port
    del store


def _be_rank(
    parent: Parent, program: Program, rank: int, nodes: list[LocalNode], config: Any, port: int, patience: float
) -> None:
    """What a rank's process runs."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    env = RankEnvironment(
        rank=rank,
        nodes=nodes,
        device=torch.device(nodes[rank].device),
        patience=patience,
        notify=lambda event: parent.send(encode_events([event])),
        store=connect_store(_HOST, port, keep=False, patience=patience),
    )
    env.stop_on(signal.SIGTERM)
    env.heartbeat = RankHeartbeat(
        connect_store(_HOST, port, keep=False, patience=patience),
        rank=rank,
        nodes=env.names,
        patience=patience,
        on_lost=lambda sentence: parent.end(NodeLost(sentence)),
    )
    run_rank(env, program, config)


def _relay(
    processes: LocalProcesses, ranks: Sequence[LocalProcess], on_event: Callable[[RunEvent], None], patience: float
) -> bool:
    """Pass on what the ranks say until all have ended, or had the time for it. Whether they were asked to stop."""
    deadline: float | None = None
    was_stopped = False
    with requests_to_stop() as requests:
        while not all(rank.has_ended and rank.is_silent for rank in ranks):
            for _, data in processes.receive(timeout=0.2):
                for event in decode_events(data):
                    on_event(event)
            failed = [rank for rank in ranks if rank.has_failed]
            if failed and deadline is None:
                is_own = any(rank.failure and rank.failure.is_own for rank in failed)
                deadline = time.monotonic() + (patience if was_stopped else _GRACE) * (0.5 if is_own else 1.0)
            if deadline is not None and time.monotonic() > deadline:
                break
            if len(requests) > 1:
                raise Interrupted("stopped at once; the last checkpoint is kept")
            if requests and not was_stopped:
                was_stopped, deadline = True, time.monotonic() + max(patience, _GRACE)
                processes.request_stop()
    return was_stopped


def _raise_first(ranks: Sequence[LocalProcess], store: Any, nodes: Sequence[LocalNode], was_stopped: bool) -> None:
    """Raise what explains the end of the run best: an own failure, then a death, then a lost connection."""
    failures = [rank.failure for rank in ranks if rank.failure is not None]
    own = [failure for failure in failures if failure.is_own]
    if own:
        raise own[0].as_error()
    for i, rank in enumerate(ranks):
        if rank.has_failed and rank.failure is None:
            raise NodeLost(f"node {nodes[i].name} (rank {i}) {rank.ending} at step {read_beat(store, i)[1]}")
    if failures:
        raise failures[0].as_error()
    if was_stopped and not all(rank.has_finished for rank in ranks):
        raise Interrupted("stopped; a rank did not end in time, the last checkpoint is kept")
