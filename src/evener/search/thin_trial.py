"""Trials of thin tasks: a process a trial, in which PyTorch is never loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from evener.config.run_config import RunConfig
from evener.launch.nodes import LocalNode
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.records.errors import EvenerError
from evener.records.events import RunEvent, encode_events
from evener.records.record import Epoch
from evener.search.local_backend import failure_of
from evener.training.thin_training import ThinSeat, train_thin

PRELOAD = ["evener.training.thin_training", "evener.search.thin_trial"]
_OVER, _ON = b"over", b"on"


class ThinRun:
    """One run of a thin task; see `NodeRun`."""

    def __init__(self, processes: LocalProcesses, nodes: Sequence[LocalNode], config: RunConfig) -> None:
        (self._node,) = nodes
        self._process = processes.start(
            self._node.name, _be_node, self._node, config, cores=self._node.cores, threads=self._node.threads
        )
        self.processes: Sequence[LocalProcess] = [self._process]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """See `NodeRun`."""
        if isinstance(event, Epoch):
            self._process.tell(_OVER if is_over else _ON)

    def is_silent(self, _now: float) -> bool:
        """See `NodeRun`: a process alone is seen to end."""
        return False

    def error(self) -> EvenerError:
        """See `NodeRun`."""
        return failure_of(self._process, self._node)

    def close(self) -> None:
        """See `NodeRun`."""


def _be_node(parent: Parent, node: LocalNode, config: RunConfig) -> None:
    stopping: list[bool] = []
    parent.on_stop(lambda: stopping.append(True))
    notify = partial(_notify, parent)

    def is_over(epoch: Epoch) -> bool:
        notify(epoch)
        return parent.hear() == _OVER

    train_thin(ThinSeat(node, notify, is_over, lambda: bool(stopping)), config)


def _notify(parent: Parent, event: RunEvent) -> None:
    parent.send(encode_events([event]))
