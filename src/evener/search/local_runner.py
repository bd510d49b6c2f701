"""Runs trials as processes of this machine, several trials at a time, each on its own nodes; and the protocol of a
runner.

    start(trial, nodes, config) -> processes
    receive() -> their messages: the end of an epoch, which waits for an answer; or the end of the run
    answer(trial, over?)        -> the run continues or ends

A trial of PyTorch is a run of ranks, as `evener train --local-nodes` starts them. A thin trial is a single process
without PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from evener.launch.nodes import NodeSpec
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.records.errors import EvenerError, NodeLost, NonFiniteLoss
from evener.records.events import RunEvent, decode_events
from evener.search.placement import TrialNode

_FAILURE_GRACE_S = 1.0
"""Seconds for which the other processes of a failed run may still report what they know of the failure."""


class TrialProcesses(Protocol):
    """The processes of one trial on its nodes.

    Attributes:
        processes: one per node.
    """

    processes: Sequence[LocalProcess]

    def answer(self, event: RunEvent, is_over: bool) -> None:
        """Answer the end of an epoch: whether the run ends there."""
        ...

    def stop(self) -> None:
        """Ask the run to stop soon, with a checkpoint."""
        ...

    def is_silent(self, now: float) -> bool:
        """Return whether a process has been silent for longer than the patience."""
        ...

    def error(self) -> EvenerError:
        """Return the error that best explains a failed run."""
        ...

    def close(self) -> None:
        """Release the resources of the run other than its processes."""
        ...


OpenTrial = Callable[[LocalProcesses, Sequence[NodeSpec], Any], TrialProcesses]


class RunEnd(NamedTuple):
    """How a run ended.

    Attributes:
        error: the error that ended it; None if it completed its work.
        is_refused: whether its nodes were not available, so that it did nothing.
        of_node: whether the cause lies in its node, so that another node may succeed.
    """

    error: EvenerError | None
    is_refused: bool = False
    of_node: bool = False

    @property
    def has_diverged(self) -> bool:
        """Whether the loss is not finite."""
        return isinstance(self.error, NonFiniteLoss)


class TrialRunner(Protocol):
    """Runs the trials of a search on nodes; `LocalRunner` and `MasterRunner` implement it."""

    def nodes(self) -> Sequence[TrialNode]:
        """Return all nodes that are present, busy or idle."""
        ...

    def start(self, number: int, nodes: Sequence[str], config: Any) -> None:
        """Start or continue the run of trial `number` on the nodes with these names."""
        ...

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """Answer the end of an epoch: whether the run ends there."""
        ...

    def stop(self, number: int) -> None:
        """Ask a run to stop soon, with a checkpoint."""
        ...

    def forget(self, number: int) -> None:
        """Discard a trial that no node works on and that will not continue."""
        ...

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """Return events and ends of runs; wait up to `timeout` seconds for the first."""
        ...


class LocalRunner:
    """Runs trials as processes of this machine, as `TrialRunner` describes.

    Args:
        processes: the processes' group; its owner ends it.
        open_trial: starts the processes of a trial.
        nodes: nodes of this machine.
    """

    def __init__(self, processes: LocalProcesses, open_trial: OpenTrial, nodes: Sequence[NodeSpec]) -> None:
        self._processes, self._open_trial = processes, open_trial
        self._nodes = {node.name: node for node in nodes}
        self._runs: dict[int, TrialProcesses] = {}
        self._failed_at: dict[int, float] = {}

    def nodes(self) -> Sequence[NodeSpec]:
        """Return the nodes of this machine."""
        return list(self._nodes.values())

    def start(self, number: int, nodes: Sequence[str], config: Any) -> None:
        """Start the processes of a trial on these nodes."""
        self._runs[number] = self._open_trial(self._processes, [self._nodes[name] for name in nodes], config)

    def answer(self, number: int, event: RunEvent, is_over: bool) -> None:
        """Pass the answer to the processes of the trial, if they still run."""
        if number in self._runs:
            self._runs[number].answer(event, is_over)

    def stop(self, number: int) -> None:
        """Ask the run of a trial to stop soon, with a checkpoint."""
        self._runs[number].stop()

    def forget(self, number: int) -> None:
        """Do nothing: a trial without processes holds no resources."""

    def receive(self, timeout: float) -> list[tuple[int, RunEvent | RunEnd]]:
        """Return events and ends of runs; wait up to `timeout` seconds for the first."""
        owners = {id(process): number for number, run in self._runs.items() for process in run.processes}
        events: list[tuple[int, RunEvent | RunEnd]] = []
        for process, data in self._processes.receive(timeout):
            events += [(owners[id(process)], event) for event in decode_events(data)]
        now = time.monotonic()
        return events + [(number, self._end(number)) for number in list(self._runs) if self._is_over(number, now)]

    def _is_over(self, number: int, now: float) -> bool:
        run = self._runs[number]
        if run.is_silent(now):
            return True
        failed = any(process.has_failed for process in run.processes)
        if failed:
            self._failed_at.setdefault(number, now)
        is_late = failed and now - self._failed_at[number] > _FAILURE_GRACE_S
        return is_late or all(process.has_ended and process.is_drained for process in run.processes)

    def _end(self, number: int) -> RunEnd:
        """Remove a run that is over, end its remaining processes, and return how it ended."""
        run = self._runs.pop(number)
        self._failed_at.pop(number, None)
        end = RunEnd(None)
        if not all(process.has_finished for process in run.processes):
            end = RunEnd(run.error())
        for process in run.processes:
            self._processes.end(process)
        run.close()
        return end


def failure_of(process: LocalProcess, node: NodeSpec) -> EvenerError:
    """Return the reason why a single process failed."""
    if process.failure is not None:
        return process.failure.as_error()
    ending = process.ending if process.has_ended else "stopped responding"
    return NodeLost(f"node {node.name} {ending}", (node.name,))
