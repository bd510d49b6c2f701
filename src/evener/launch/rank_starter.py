"""The start of ranks as processes of this machine, and the answers to their questions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from evener.comm.signed_store import SignedStore
from evener.launch.nodes import NodeSpec
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.launch.rank_environment import RankFunction, hosted_environment, run_rank
from evener.launch.store import connect_store, keep_store, new_secret
from evener.records.events import RunEvent
from evener.records.record import Epoch

_HOST = "127.0.0.1"
_LOOKING = timedelta(days=7)
"""Limit of a user's time at the end of an epoch."""


class RankStarter:
    """The start of ranks of one run, with a rendezvous store on the loopback interface.

    Args:
        processes: in which they run.
        program, nodes, config, patience, is_elastic: see `run_local`.

    Attributes:
        store: of the run.
    """

    def __init__(
        self,
        processes: LocalProcesses,
        program: RankFunction,
        nodes: Sequence[NodeSpec],
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
        """Start the process of `rank`, with this number in an elastic run."""
        node, process = self._nodes[rank], number if self._is_elastic else None
        arguments = (self._program, rank, *self._arguments, process)
        return self._processes.start(node.name, _run_rank, *arguments, cores=node.cores, threads=node.threads)


def _run_rank(
    parent: Parent,
    program: RankFunction,
    rank: int,
    nodes: list[NodeSpec],
    config: Any,
    open_store: Callable[[], SignedStore],
    patience: float,
    number: int | None,
) -> None:
    """Run a rank in its process; `number` is that in an elastic run, which may already be under way."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    env = hosted_environment(
        parent,
        open_store,
        rank=rank,
        nodes=nodes,
        patience=patience,
        process=number,
        is_late=number is not None and number >= len(nodes),
    )
    env.answer = partial(_answer, env.store)
    run_rank(env, program, config)


def show_event(store: Any, on_event: Callable[[RunEvent], object], event: RunEvent) -> None:
    """Show an event; at the end of an epoch, publish the answer in the store for the leader."""
    said = on_event(event)
    if isinstance(event, Epoch):
        store.set(_end_of(event), "over" if said else "on")


def _answer(store: Any, epoch: Epoch) -> bool:
    """Wait for the answer of the process that started this one to the end of `epoch`."""
    store.wait([_end_of(epoch)], _LOOKING)
    return bool(store.get(_end_of(epoch)) == b"over")


def _end_of(epoch: Epoch) -> str:
    return f"epoch/{epoch.epoch}"
