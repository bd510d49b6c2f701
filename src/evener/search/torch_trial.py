"""Trials as runs of ranks on local nodes, as `evener train` starts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evener.launch.nodes import NodeSpec
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.launch.rank_environment import RankFunction
from evener.launch.rank_heartbeat import has_left, read_beat
from evener.launch.rank_starter import RankStarter, show_event
from evener.launch.ranks import raise_first
from evener.launch.store import LEAST_START_SECONDS
from evener.records.errors import EvenerError, NodeLost
from evener.records.events import RunEvent
from evener.system.heartbeat import ListenedSeconds, Progress
from evener.training.rank import train_rank


class TorchTrial:
    """The ranks of a trial, as `TrialProcesses` describes.

    Args:
        processes: in which they run.
        nodes: one per rank.
        config: argument of the program, with a `patience`.
        program: of a rank.
    """

    def __init__(
        self,
        processes: LocalProcesses,
        nodes: Sequence[NodeSpec],
        config: Any,
        program: RankFunction = train_rank,
    ) -> None:
        self._nodes, self._patience = nodes, config.patience
        starter = RankStarter(processes, program, nodes, config, config.patience)
        self._store = starter.store
        self._beats = [Progress(0.0) for _ in nodes]
        self._listened = ListenedSeconds(config.patience, time.monotonic())
        self.processes: Sequence[LocalProcess] = [starter.start(rank, rank) for rank in range(len(nodes))]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """Answer the end of an epoch through the ranks' store."""
        show_event(self._store, lambda _: is_over, event)

    def stop(self) -> None:
        """Ask the ranks to stop after their step, with a checkpoint."""
        for process in self.processes:
            process.request_stop()

    def is_silent(self, now: float) -> bool:
        """Return whether a rank has sent no heartbeat for longer than the patience."""
        listened = self._listened.at(now)
        for rank, (process, progress) in enumerate(zip(self.processes, self._beats, strict=True)):
            count, _ = read_beat(self._store, rank)
            patience = self._patience if count else max(self._patience, LEAST_START_SECONDS)
            expected = not process.has_ended and not has_left(self._store, rank)
            if progress.idle_seconds(count, expected=expected, now=listened) > patience:
                return True
        return False

    def error(self) -> EvenerError:
        """Return the first error of a rank, or NodeLost if the ranks stopped responding."""
        try:
            raise_first(self.processes, self._store, self._nodes, False, None)
        except EvenerError as error:
            return error
        names = [node.name for node in self._nodes]
        return NodeLost(f"node {', '.join(names)} stopped responding (no heartbeat for {self._patience:g} s)", names)

    def close(self) -> None:
        """Close the ranks' store."""
        del self._store
