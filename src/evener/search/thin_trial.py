"""Trials of thin tasks: one process per trial, which never loads PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from evener.config.run_config import RunConfig
from evener.launch.nodes import LocalNode
from evener.launch.parent import Parent
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.records.errors import EvenerError
from evener.records.events import RunEvent, encode_events
from evener.records.record import Epoch
from evener.search.local_backend import failure_of
from evener.training.thin_training import ThinContext, train_thin

PRELOAD = ["evener.training.thin_training", "evener.search.thin_trial"]
_END, _CONTINUE = b"over", b"on"


class ThinTrial:
    """The process of a thin trial, as `TrialProcesses` describes."""

    def __init__(self, processes: LocalProcesses, nodes: Sequence[LocalNode], config: RunConfig) -> None:
        (self._node,) = nodes
        self._process = processes.start(
            self._node.name, _run_node, self._node, config, cores=self._node.cores, threads=self._node.threads
        )
        self.processes: Sequence[LocalProcess] = [self._process]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """Send the answer to the end of an epoch to the process."""
        if isinstance(event, Epoch):
            self._process.tell(_END if is_over else _CONTINUE)

    def is_silent(self, _now: float) -> bool:
        """Return False: a single process cannot hang on others, and its end is noticed."""
        return False

    def error(self) -> EvenerError:
        """Return the reason why the process failed."""
        return failure_of(self._process, self._node)

    def close(self) -> None:
        """Do nothing: the run holds no other resources."""


def _run_node(parent: Parent, node: LocalNode, config: RunConfig) -> None:
    stopping: list[bool] = []
    parent.on_stop(lambda: stopping.append(True))

    def notify(event: RunEvent) -> None:
        parent.send(encode_events([event]))

    def is_over(epoch: Epoch) -> bool:
        notify(epoch)
        return parent.hear() == _END

    train_thin(ThinContext(node, notify, is_over, lambda: bool(stopping)), config)
