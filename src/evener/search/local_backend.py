"""The runs of a search's trials: processes of this machine, several runs beside each other, each on its nodes.

    start(trial, nodes, config) -> processes
    receive() -> what they say: the end of an epoch, which waits for an answer; or how the run ended
    answer(trial, over?)        -> the run goes on, or ends there

A trial of PyTorch is a run of ranks, as `evener train --local-nodes` starts them; a thin one is a process without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from evener.config.run_config import RunConfig
from evener.launch.nodes import LocalNode
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.records.errors import EvenerError, NodeLost, NonFiniteLoss
from evener.records.events import RunEvent, decode_events
from evener.search.placement import TrialNode

_LAST_WORDS = 1.0
"""Seconds in which the others of a run may say what they know of the failure of one."""


class NodeRun(Protocol):
    """One run on its nodes.

    Attributes:
        processes: one a node.
    """

    processes: Sequence[LocalProcess]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """Say to the end of an epoch whether the run ends there."""
        ...

    def is_silent(self, now: float) -> bool:
        """Whether a process has given no sign of life for the patience."""
        ...

    def error(self) -> EvenerError:
        """Of a run that has failed: what explains it best."""
        ...

    def close(self) -> None:
        """Let go of what the run held besides its processes."""
        ...


OpenRun = Callable[[LocalProcesses, Sequence[LocalNode], RunConfig], NodeRun]


class RunEnd(NamedTuple):
    """How a run ended.

    Attributes:
        error: that ended it; None if it did all that was to be done.
        is_refused: whether it could not have its nodes, and did nothing.
        of_node: whether its node could not take part in it, which another one may.
    """

    error: EvenerError | None
    is_refused: bool = False
    of_node: bool = False

    @property
    def has_diverged(self) -> bool:
        """Whether the loss is not finite."""
        return isinstance(self.error, NonFiniteLoss)


class Runs(Protocol):
    """What a search needs of whoever runs its trials; see `TrialRuns`."""

    def nodes(self) -> Sequence[TrialNode]:
        """Those that are here, whether they work or not."""
        ...

    def start(self, number: int, nodes: Sequence[str], config: RunConfig) -> None:
        """Begin the run of trial `number` on the nodes of these names, or go on with it there."""
        ...

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """Say to the end of an epoch whether the run ends there."""
        ...

    def stop(self, number: int) -> None:
        """Ask a run to stop after its step, with a checkpoint."""
        ...

    def forget(self, number: int) -> None:
        """Nobody will go on with a trial that no nodes work on."""
        ...

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """What runs have said, and which have ended; returns early when one of them says or does anything."""
        ...


class TrialRuns:
    """All runs that are under way, as processes of this machine; see `Runs`.

    Args:
        processes: in which they run; ended by whoever opened them.
        open_run: starts one.
        nodes: of this machine.
    """

    def __init__(self, processes: LocalProcesses, open_run: OpenRun, nodes: Sequence[LocalNode]) -> None:
        self._processes, self._open_run = processes, open_run
        self._nodes = {node.name: node for node in nodes}
        self._runs: dict[int, NodeRun] = {}
        self._failed_at: dict[int, float] = {}

    def nodes(self) -> Sequence[LocalNode]:
        """See `Runs`."""
        return list(self._nodes.values())

    def start(self, number: int, nodes: Sequence[str], config: RunConfig) -> None:
        """See `Runs`."""
        self._runs[number] = self._open_run(self._processes, [self._nodes[name] for name in nodes], config)

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """See `Runs`."""
        if number in self._runs:
            self._runs[number].answer(event, is_over)

    def stop(self, number: int) -> None:
        """See `Runs`."""
        for process in self._runs[number].processes:
            process.request_stop()

    def forget(self, number: int) -> None:
        """See `Runs`."""

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """See `Runs`."""
        owners = {id(process): number for number, run in self._runs.items() for process in run.processes}
        found: list[tuple[int, RunEvent | RunEnd]] = []
        for process, data in self._processes.receive(timeout):
            found += [(owners[id(process)], event) for event in decode_events(data)]
        now = time.monotonic()
        return found + [(number, self._ended(number)) for number in list(self._runs) if self._is_over(number, now)]

    def _is_over(self, number: int, now: float) -> bool:
        run = self._runs[number]
        if run.is_silent(now):
            return True
        failed = any(process.has_failed for process in run.processes)
        if failed:
            self._failed_at.setdefault(number, now)
        is_late = failed and now - self._failed_at[number] > _LAST_WORDS
        return is_late or all(process.has_ended and process.is_silent for process in run.processes)

    def _ended(self, number: int) -> RunEnd:
        """Take a run that is over away; its processes that are left are ended."""
        run = self._runs.pop(number)
        self._failed_at.pop(number, None)
        end = RunEnd(None)
        if not all(process.has_finished for process in run.processes):
            end = RunEnd(run.error())
        for process in run.processes:
            self._processes.end(process)
        run.close()
        return end


def failure_of(process: LocalProcess, node: LocalNode) -> EvenerError:
    """Why a process alone failed."""
    if process.failure is not None:
        return process.failure.as_error()
    ending = process.ending if process.has_ended else "has been silent"
    return NodeLost(f"node {node.name} {ending}", (node.name,))
