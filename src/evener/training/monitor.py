"""The reports of all ranks' steps, and decisions from them: history, new shares, the end. The same on all ranks.

A rank's report of a step travels while the next one computes. Every rank decides from the same reports of all ranks,
so decisions need no message.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from evener.comm.group import Group
from evener.comm.step_timing import StepTiming
from evener.data.sampler import Division
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost, apportion
from evener.oracle.data_parallel import faster_members
from evener.oracle.rebalance import Balance
from evener.records.errors import NonFiniteLoss, TrainingFailed
from evener.records.history import History
from evener.records.record import Epoch, Event, Step, Validation
from evener.report.text import human_seconds
from evener.system import accelerators
from evener.system.memory import peak_memory
from evener.training.step import Reports, StepReport, StepResult, entry_of

_NUM_TIMED_STEPS = 24
"""Steps whose median is the usual step time."""
WARM_UP = 6
"""Steps whose times are ignored: they fill memory and caches, up to a fifth slower than all later ones."""

_SAME_RATE, _SAME_WEIGHT, _MIN_WEIGHT = 1e-9, 1e-2, 1e-5
"""Relative and absolute differences: machines of several kinds differ in the last digits, which training magnifies."""


class Monitor:
    """The exchange of step reports between ranks, and the decisions that follow from them.

    Args:
        env: shows events to the user; knows whether a rank was asked to stop.
        group: the ranks.
        division: of samples; None if shares are fixed by where the data is.
        balance: the start of re-balancing; None to keep shares fixed.
        micro_batches: of a step.
        lead: steps that are loaded ahead, at most.
        warm_up: steps after the first whose times are ignored.
        advice: the end of the error message for a non-finite loss; None to ignore such losses.
        is_due: whether it is time for a checkpoint, on this rank.
        is_followed: whether this rank knows that other ranks are to take part.
        is_behind: whether this rank does not have the state of the training yet.

    Attributes:
        history: of the run.
        balance: the current state of re-balancing; None if shares are fixed.
        catching_up: ranks that get samples once they have the state, with their costs.
        is_stopping: whether a rank was asked to stop.
        is_saving: whether a checkpoint is due on any rank; the loop resets it after saving.
        is_regrouping: whether other ranks are to take part after this step.
        has_new_loss: whether a rank computed its loss in another way; the reader resets it.
    """

    def __init__(
        self,
        env: RankEnvironment,
        group: Group,
        *,
        division: Division | None,
        balance: Balance | None,
        micro_batches: int = 1,
        lead: int = 0,
        warm_up: int = WARM_UP,
        advice: Callable[[], str] | None = str,
        is_due: Callable[[], bool] = bool,
        is_followed: Callable[[], bool] = bool,
        is_behind: Callable[[], bool] = bool,
    ) -> None:
        self._env, self._group, self._division, self.balance = env, group, division, balance
        self._micro_batches, self._lead, self._warm_up = micro_batches, lead, warm_up
        self._advice, self._is_due, self._is_followed, self._is_behind = advice, is_due, is_followed, is_behind
        self._reports = Reports(group)
        self._unsent: deque[tuple[int, StepResult, accelerators.HostCopy, float]] = deque()
        self._timings: deque[StepTiming] = deque([StepTiming(samples=0)], maxlen=1)
        self.history = History()
        self.catching_up: dict[int, NodeCost] = {}
        self._nodes = list(group.nodes)
        self._walls: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self._slow: tuple[str, ...] = ()
        for column in range(group.size):
            self.history.add_node(str(column))
        self._sent_before, self._cpu_before = 0, time.process_time()
        self._first = 1
        self._mark = time.perf_counter()
        self.is_stopping = self.is_saving = self.is_regrouping = self.has_new_loss = False
        self._lag = int(group.has_accelerators)  # all ranks act on reports after the same step

    def start(self, first: int) -> None:
        """Start the clock of step `first`."""
        self._first = first
        self.restart_clock()

    def regroup(
        self, division: Division, balance: Balance | None, nodes: Sequence[str], catching_up: Mapping[int, NodeCost]
    ) -> None:
        """Continue with other ranks; reports of previous ones are dropped.

        Args:
            division: of samples, from now on.
            balance: the start of re-balancing; None to keep shares fixed.
            nodes: of the whole run, in the order of the history's columns.
            catching_up: see the attributes.
        """
        self._division, self.balance, self._nodes, self.catching_up = division, balance, list(nodes), dict(catching_up)
        for column in range(len(nodes)):
            self.history.add_node(str(column))
        self._reports = Reports(self._group)
        self._lag = int(self._group.has_accelerators)
        self._walls.clear()
        self._unsent.clear()
        self._group.timer.discard()
        self._timings.append(StepTiming(samples=0))
        self._sent_before = self._group.traffic.sent_bytes
        self.is_stopping = self.is_saving = self.is_regrouping = self.has_new_loss = False

    def restart_clock(self) -> None:
        """Restart the clock: the time since the last step belongs to no step."""
        self._mark, self._cpu_before = time.perf_counter(), time.process_time()

    def add(self, step: int, outcome: StepResult) -> None:
        """Report `step`, which is over on this rank, and receive the reports of the previous step."""
        self._timings.extend(self._group.timer.close_step(outcome.samples))
        now = time.perf_counter()
        loss = accelerators.HostCopy(0.0 if outcome.loss is None else outcome.loss)
        self._unsent.append((step, outcome, loss, now - self._mark))
        self._mark = now
        if len(self._unsent) > self._lag:
            self._send()
        if len(self._reports) > 1:
            self._receive()

    def settle(self) -> None:
        """Receive all reports up to this step, before weights are saved or validated."""
        while self._unsent:
            self._send()
        while len(self._reports):
            self._receive()

    def emit(self, what: Step | Validation | Event) -> None:
        """Record an event, and have the leader show it."""
        if isinstance(what, Event):
            self.history.events.append(what)
        if isinstance(what, Validation):
            self.history.add_validation(what)
        if self._group.is_leader:
            self._env.notify(what)

    def is_over(self, step: int, epoch: int) -> bool:
        """Return whether a callback ends the run with `epoch`, whose last step was `step`; every rank calls this."""
        word = b""
        if self._group.is_leader:
            last = self.history.validations[-1:]
            validation = last[0] if last and last[0].epoch == epoch else None
            end = Epoch(step=step, epoch=epoch, loss=self.history.last_loss(), validation=validation)
            word = b"over" if self._env.is_over(end) else b""
        if not self._group.broadcast(word):
            return False
        self.emit(Event(step=step, kind="ended", message=f"as was said at the end of epoch {epoch + 1}"))
        return True

    def _send(self) -> None:
        step, outcome, loss, wall = self._unsent.popleft()
        cpu = time.process_time()
        timing, sent = self._timings[0], self._group.traffic.sent_bytes
        self._reports.send(
            StepReport(
                step=step,
                samples=outcome.samples,
                total=outcome.total,
                epoch=outcome.epoch,
                loss=loss.read(),
                wall=wall,
                timed_samples=timing.samples,
                io=timing.io,
                fb=timing.fb,
                wu=timing.wu,
                sent=sent - self._sent_before,
                stop=int(self._env.stop_requested),
                save=int(self._is_due()),
                leave=int(self._is_followed()),
                has_loss=int(outcome.loss is not None),
                rate=outcome.rate,
                weight=outcome.weight,
                new_loss=int(outcome.has_new_loss),
                behind=int(self._is_behind()),
                cpu=cpu - self._cpu_before,
                memory=peak_memory(str(self._group.device)),
            )
        )
        self._sent_before, self._cpu_before = sent, cpu

    def _receive(self) -> None:
        """Read the reports of the oldest step and act on them."""
        reports = self._reports.receive()
        self._refuse_non_finite(reports)
        self._refuse_different(reports)
        self.is_stopping = self.is_stopping or any(report.stop for report in reports)
        self.is_saving = self.is_saving or any(report.save for report in reports)
        self.is_regrouping = self.is_regrouping or any(report.leave for report in reports)
        self.has_new_loss = self.has_new_loss or any(report.new_loss for report in reports)
        if not self._admit(reports):
            self._rebalance(reports)
            self._name_slow_nodes(reports)
        entry = entry_of(reports, [str(self._nodes.index(node)) for node in self._group.nodes])
        self.history.add(entry)
        self.emit(entry.as_step(self.history.names))

    def _refuse_non_finite(self, reports: Sequence[StepReport]) -> None:
        if self._advice is None:
            return
        for report, node in zip(reports, self._group.nodes, strict=True):
            if not math.isfinite(report.loss):
                raise NonFiniteLoss(node, report.step, report.loss, self._advice())

    def _refuse_different(self, reports: Sequence[StepReport]) -> None:
        """Raise TrainingFailed if replicas differ."""
        first, nodes = reports[0], self._group.nodes
        for other, node in zip(reports, nodes, strict=True):
            if not _is_close(first.rate, other.rate, _SAME_RATE):
                raise TrainingFailed(
                    f"in step {first.step} the learning rate is {first.rate:g} on node {nodes[0]} and {other.rate:g} "
                    f"on node {node}: give schedules the same numbers on all nodes, such as run.mean(loss)"
                )
            if not _is_close(first.weight, other.weight, _SAME_WEIGHT, _MIN_WEIGHT):
                raise TrainingFailed(
                    f"in step {first.step} a weight is {first.weight:g} on node {nodes[0]} and {other.weight:g} on "
                    f"node {node}: something that only one node knows changes the model or its optimiser"
                )

    def _admit(self, reports: Sequence[StepReport]) -> bool:
        """Give samples to ranks that were `catching_up` and have the state now; return whether there are any."""
        come = [rank for rank in self.catching_up if not reports[rank].behind]
        if not come or self._division is None:
            return False
        start = self._next_change(reports[0].step)
        workers = list(self._division.costs(start))
        for rank in come:
            workers[rank] = self.catching_up.pop(rank)
        self._division.change(start, workers)
        if self.balance is not None:
            shares = apportion(sum(self.balance.shares), workers)
            self.balance = Balance(costs=tuple(workers), shares=shares)
        names = tuple(self._group.nodes[rank] for rank in come)
        message = f"{' and '.join(names)} caught up with the others, and has samples from step {start} on"
        self.emit(Event(step=reports[0].step, kind="caught up", message=message, nodes=names))
        return True

    def _next_change(self, step: int) -> int:
        """Return the first step that no rank has loaded yet when it reads the reports of `step`."""
        return step + 3 + self._lag + self._lead

    def _rebalance(self, reports: Sequence[StepReport]) -> None:
        if self.balance is None or self._division is None or reports[0].step < self._first + self._warm_up:
            return
        seconds = [report.computing / self._micro_batches for report in reports]
        samples = [-(-report.timed_samples // self._micro_batches) for report in reports]
        decision = self.balance.observe(samples, seconds).decide()
        self.balance = decision.balance
        if decision.shares is None:
            return
        start = self._next_change(reports[0].step)
        self._division.change(start, decision.balance.costs)
        shares = ", ".join(f"{node} {n}" for node, n in zip(self._group.nodes, decision.shares, strict=True))
        message = f"from step {start} on: {shares} (a step {decision.gain / (1 + decision.gain):.0%} shorter)"
        self.emit(Event(step=reports[0].step, kind="rebalanced", message=message))

    def _name_slow_nodes(self, reports: Sequence[StepReport]) -> None:
        """Report once which nodes make steps much longer; they cannot be removed any more."""
        if self.balance is None or self._slow:
            return
        self._walls.append(max(report.wall for report in reports))
        workers = self.balance.observed()
        if workers is None or len(self._walls) < _NUM_TIMED_STEPS:
            return
        seconds = median(self._walls)
        self._walls.clear()
        faster = faster_members(workers, self.balance.shares, self._micro_batches, seconds)
        if faster is None:
            return
        self._slow = tuple(node for rank, node in enumerate(self._group.nodes) if rank not in faster[0])
        names = " and ".join(self._slow)
        message = (
            f"a step takes {human_seconds(seconds)}; without {names} it would take {human_seconds(faster[1])}: "
            f"train without {names}, or type `evener doctor` there to see why"
        )
        self.emit(Event(step=reports[0].step, kind="slows the run down", message=message, nodes=self._slow))


def _is_close(first: float, other: float, relative: float, absolute: float = 0.0) -> bool:
    both_nan = math.isnan(first) and math.isnan(other)  # as in one process, which goes on with them
    return both_nan or math.isclose(first, other, rel_tol=relative, abs_tol=absolute)
