"""How steps went on every rank, and what follows from it: the history, new shares, an end. The same on all ranks.

A rank's report of a step travels while the next one computes. What is decided here is decided from the reports of all
ranks, which all have, so nobody has to be told.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from evener.comm.group import Group
from evener.comm.host_copy import HostCopy
from evener.comm.step_timing import StepTiming
from evener.data.sampler import Division
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion
from evener.oracle.data_parallel import faster_members
from evener.oracle.rebalance import Balance
from evener.records.errors import NonFiniteLoss, TrainingFailed
from evener.records.history import History
from evener.records.record import Epoch, Event, Step, Validation
from evener.report.text import human_seconds
from evener.system.memory import peak_memory
from evener.training.step import Reports, StepReport, StepResult, entry_of

_WALLS = 24
"""Steps whose seconds tell what a step usually takes."""
WARM_UP = 6
"""Steps that say nothing of a node's speed: they fill memory and caches, up to a fifth slower than all later ones."""

_SAME_RATE, _SAME_WEIGHT, _LEAST_WEIGHT = 1e-9, 1e-2, 1e-5
"""Relative and absolute differences: machines of several kinds differ in the last digits, which training magnifies."""


class Monitor:
    """Reports of this rank's steps to all others, and what all of them make of everybody's.

    Args:
        env: shows events to the user; knows whether a rank was asked to stop.
        group: the ranks.
        division: of samples; None if shares are fixed by where the data is.
        balance: what re-balancing starts from; None to leave shares alone.
        micro_batches: of a step.
        lead: steps that are loaded ahead, at most.
        warm_up: steps after the first that nothing is learnt from.
        advice: what a loss that is not finite is told with; None if such a loss is somebody else's affair.
        is_due: whether it is time for a checkpoint, on this rank.
        is_followed: whether this rank knows that other ranks are to take part.
        is_behind: whether this rank has not the state of the training yet.

    Attributes:
        history: of the run.
        balance: what re-balancing knows now; None where shares are left alone.
        awaited: ranks that have no samples before they have the state, and what samples will cost them.
        is_stopping: whether a rank was asked to stop.
        is_saving: whether it is time for a checkpoint, on any rank; whoever saves one says that it is not any more.
        is_leaving: whether other ranks are to take part after this step.
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
        self._unsent: deque[tuple[int, StepResult, HostCopy, float]] = deque()
        self._timings: deque[StepTiming] = deque([StepTiming(samples=0)], maxlen=1)
        self.history = History()
        self.awaited: dict[int, Worker] = {}
        self._nodes = list(group.nodes)
        self._walls: deque[float] = deque(maxlen=_WALLS)
        self._slow: tuple[str, ...] = ()
        for column in range(group.size):
            self.history.add_node(str(column))
        self._sent_before, self._cpu_before = 0, time.process_time()
        self._first = 1
        self._mark = time.perf_counter()
        self.is_stopping = self.is_saving = self.is_leaving = False
        self._lag = 1 if group.device.type == "cuda" else 0

    def start(self, first: int) -> None:
        """The next step is number `first`, and begins now."""
        self._first = first
        self.restart_clock()

    def regroup(
        self, division: Division, balance: Balance | None, nodes: Sequence[str], awaited: Mapping[int, Worker]
    ) -> None:
        """Other ranks take part from now on; reports of those before are not waited for.

        Args:
            division: of samples, from now on.
            balance: what re-balancing starts from; None to leave shares alone.
            nodes: of the whole run, in the order of the history's columns.
            awaited: see above.
        """
        self._division, self.balance, self._nodes, self.awaited = division, balance, list(nodes), dict(awaited)
        for column in range(len(nodes)):
            self.history.add_node(str(column))
        self._reports = Reports(self._group)
        self._walls.clear()
        self._unsent.clear()
        self._group.timer.discard()
        self._timings.append(StepTiming(samples=0))
        self._sent_before = self._group.traffic.sent_bytes
        self.is_stopping = self.is_saving = self.is_leaving = False

    def restart_clock(self) -> None:
        """The next step begins now: what was done since the last one belongs to none."""
        self._mark, self._cpu_before = time.perf_counter(), time.process_time()

    def add(self, step: int, outcome: StepResult) -> None:
        """`step` is over on this rank: report it, and receive the reports of the step before."""
        self._timings.extend(self._group.timer.close_step(outcome.samples))
        now = time.perf_counter()
        loss = HostCopy(0.0 if outcome.loss is None else outcome.loss)
        self._unsent.append((step, outcome, loss, now - self._mark))
        self._mark = now
        if len(self._unsent) > self._lag:
            self._send()
        if len(self._reports) > 1:
            self._receive()

    def settle(self) -> None:
        """Receive everything up to this step, so that what is saved or measured now is known to be sound."""
        while self._unsent:
            self._send()
        while len(self._reports):
            self._receive()

    def emit(self, what: Step | Validation | Event) -> None:
        """Keep an event, and have the leader show it."""
        if isinstance(what, Event):
            self.history.events.append(what)
        if isinstance(what, Validation):
            self.history.validations.append(what)
        if self._group.is_leader:
            self._env.notify(what)

    def is_over(self, step: int, epoch: int) -> bool:
        """Whether whoever watches the run ends it with `epoch`, whose last step was `step`; every rank calls this."""
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
                told=int(outcome.loss is not None),
                rate=outcome.rate,
                weight=outcome.weight,
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
        self.is_leaving = self.is_leaving or any(report.leave for report in reports)
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
        """Raises TrainingFailed: replicas are not alike."""
        first, nodes = reports[0], self._group.nodes
        for other, node in zip(reports, nodes, strict=True):
            if not math.isclose(first.rate, other.rate, rel_tol=_SAME_RATE):
                raise TrainingFailed(
                    f"in step {first.step} the learning rate is {first.rate:g} on node {nodes[0]} and {other.rate:g} "
                    f"on node {node}: give schedules the same numbers on all nodes, such as run.mean(loss)"
                )
            if not math.isclose(first.weight, other.weight, rel_tol=_SAME_WEIGHT, abs_tol=_LEAST_WEIGHT):
                raise TrainingFailed(
                    f"in step {first.step} a weight is {first.weight:g} on node {nodes[0]} and {other.weight:g} on "
                    f"node {node}: something that only one node knows changes the model or its optimiser"
                )

    def _admit(self, reports: Sequence[StepReport]) -> bool:
        """Give samples to ranks that were awaited and have the state now; whether there are any."""
        come = [rank for rank in self.awaited if not reports[rank].behind]
        if not come or self._division is None:
            return False
        start = self._next_change(reports[0].step)
        workers = list(self._division.workers(start))
        for rank in come:
            workers[rank] = self.awaited.pop(rank)
        self._division.change(start, workers)
        if self.balance is not None:
            shares = apportion(sum(self.balance.shares), workers)
            self.balance = Balance(workers=tuple(workers), shares=shares)
        names = tuple(self._group.nodes[rank] for rank in come)
        message = f"{' and '.join(names)} caught up with the others, and has samples from step {start} on"
        self.emit(Event(step=reports[0].step, kind="caught up", message=message, nodes=names))
        return True

    def _next_change(self, step: int) -> int:
        """The first step that nobody has loaded yet who reads the reports of `step` now."""
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
        self._division.change(start, decision.balance.workers)
        shares = ", ".join(f"{node} {n}" for node, n in zip(self._group.nodes, decision.shares, strict=True))
        message = f"from step {start} on: {shares} (a step {decision.gain / (1 + decision.gain):.0%} shorter)"
        self.emit(Event(step=reports[0].step, kind="rebalanced", message=message))

    def _name_slow_nodes(self, reports: Sequence[StepReport]) -> None:
        """Say once which nodes make steps much longer: here they cannot be left out any more."""
        if self.balance is None or self._slow:
            return
        self._walls.append(max(report.wall for report in reports))
        workers = self.balance.observed()
        if workers is None or len(self._walls) < _WALLS:
            return
        seconds = median(self._walls)
        self._walls.clear()
        found = faster_members(workers, self.balance.shares, self._micro_batches, seconds)
        if found is None:
            return
        self._slow = tuple(node for rank, node in enumerate(self._group.nodes) if rank not in found[0])
        message = (
            f"a step takes {human_seconds(seconds)}, and {human_seconds(found[1])} are predicted without "
            f"{' and '.join(self._slow)}: train without them, or see what else runs there"
        )
        self.emit(Event(step=reports[0].step, kind="slows the run down", message=message, nodes=self._slow))
