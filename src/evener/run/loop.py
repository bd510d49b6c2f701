"""The loop of one rank, from the first step to the record. What is decided here is decided alike on every rank.

for step in steps:
    one optimiser step
    report to the others how it went; receive, one step late, how it went everywhere
    non-finite loss? asked to stop? shares to be moved?
    at the end of an epoch: validation, checkpoint
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from evener.comm.step_timing import StepTiming
from evener.data.loader import Loader, seed_all
from evener.errors import Interrupted, InvalidInput, NonFiniteLoss
from evener.history import History
from evener.oracle.apportion import apportion, weights_to_workers
from evener.record import Event, Step, Validation
from evener.run.checkpoint import Checkpoint, Checkpoints, CheckpointState, refuse_other_run
from evener.run.checkpoint_writer import CheckpointWriter
from evener.run.config import RunConfig
from evener.run.step import Reports, StepReport, StepResult, TrainStep, entry_of, evaluate
from evener.run.training import Training

_WARM_UP = 6
"""Steps that say nothing of a node's speed: they fill memory and caches, up to a fifth slower than all later ones."""


class Loop:
    """The state of one rank's loop; `run` goes through it, `one_step` performs a single step of it.

    Args:
        training: what it works with.
        config: says where and when to write checkpoints, whether to go on from one, and how to load data.
    """

    def __init__(self, training: Training, config: RunConfig) -> None:
        self._training, self._context, self._config = training, training.context, config
        self._group, self._model, self._plan = training.group, training.model, training.plan
        self._step = TrainStep(training)
        self._reports = Reports(self._group)
        self._unsent: deque[tuple[int, StepResult, float]] = deque()
        self._timings: deque[StepTiming] = deque([StepTiming(samples=0)], maxlen=1)
        self._checkpoints = Checkpoints(config.checkpoint_folder)
        self._writer = CheckpointWriter(self._checkpoints)
        self._history = History()
        self._columns = [str(rank) for rank in range(self._group.size)]
        for column in self._columns:
            self._history.add_node(column)
        self._balance = training.balance
        self._sent_before = 0
        self._first = 1
        self._mark = time.perf_counter()
        self._stopping = self._is_due = False
        self._saved_at = time.monotonic()
        self._lag = 1 if self._group.device.type == "cuda" else 0

    def run(self) -> History:
        """All steps from the first, or from the checkpoint to resume from, to the last; the same history on every rank.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite; checkpoints are left as they were.
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        first = self._first = self._start()
        loader = self.loader(first)
        begin = self._mark = time.perf_counter()
        with self._writer:
            for step in range(first, self._training.num_steps + 1):
                self._step_and_save(step, loader)
            self._emit_all(self._writer.wait())
        self._history.wall_seconds = time.perf_counter() - begin
        return self._history

    def _step_and_save(self, step: int, loader: Loader) -> None:
        every = self._config.checkpoint_steps
        self.one_step(step, loader)
        self._emit_all(self._writer.finished())
        if step % self._training.sampler.steps_per_epoch == 0:
            self._end_epoch(step)
        elif self._is_due or (every and step % every == 0):
            self._settle()
            self._save(step)
        if self._stopping:
            self._stop(step)

    def loader(self, first: int) -> Loader:
        """The batches from step `first` on."""
        return Loader(
            self._context.train_data,
            self._training.sampler,
            first=first,
            last=self._training.num_steps,
            device=self._group.device,
            seed=self._context.seed,
            workers=self._config.workers,
        )

    def _start(self) -> int:
        """The first step to do: 1, or the one after the checkpoint to resume from."""
        self._model.train()
        if not self._config.resume:
            if not self._checkpoints.is_empty:
                raise InvalidInput(
                    f"{self._checkpoints.folder} holds checkpoints of an earlier run; "
                    "add --resume to go on with it, or name another folder with --checkpoint"
                )
            return 1
        self._set_aside_damaged()
        folder, state = self._checkpoints.latest()
        self._refuse_different_checkpoints(state.step)
        refuse_other_run(state, self._state(state.step), folder)
        optimizer, scheduler = self._training.optimizer, self._training.scheduler
        self._checkpoints.load(folder, state, self._model, optimizer, scheduler, self._context.arithmetic.scaler)
        self._emit(Event(step=state.step, kind="resumed", message=f"resumed after step {state.step} from {folder}"))
        return state.step + 1

    def _set_aside_damaged(self) -> None:
        """The first rank of all renames damaged checkpoints, before anybody reads one."""
        for folder in self._checkpoints.set_aside_damaged() if self._group.is_leader else ():
            self._emit(Event(step=0, kind="damaged checkpoint", message=f"it is called {folder} now"))
        self._group.barrier()

    def _refuse_different_checkpoints(self, step: int) -> None:
        """Raises InvalidInput on every rank if the ranks do not see the same checkpoint."""
        group = self._group
        steps = [int(row) for row in group.all_gather_bytes(str(step).encode())]
        if len(set(steps)) > 1:
            seen = ", ".join(f"{node} step {s}" for node, s in zip(group.nodes, steps, strict=True))
            raise InvalidInput(
                f"the nodes see different checkpoints ({seen}): {self._checkpoints.folder} must be shared"
            )

    def one_step(self, step: int, loader: Loader) -> None:
        """Perform `step`, the loader's next, report it, and receive the reports of the step before."""
        env = self._context.env
        env.at_step(step)
        self._group.timer.pace.speed = env.node.speed_at(step)
        seed_all(self._context.seed, step, self._model.rng_stream, device=self._group.device)
        outcome = self._step(loader)
        self._timings.extend(self._group.timer.close_step(outcome.samples))
        now = time.perf_counter()
        self._unsent.append((step, outcome, now - self._mark))
        self._mark = now
        if len(self._unsent) > self._lag:
            self._send()
        if len(self._reports) > 1:
            self._receive()

    def _send(self) -> None:
        step, outcome, wall = self._unsent.popleft()
        timing, sent = self._timings[0], self._group.traffic.sent_bytes
        self._reports.send(
            StepReport(
                step=step,
                samples=outcome.samples,
                total=outcome.total,
                epoch=outcome.epoch,
                loss=float(outcome.loss),
                wall=wall,
                timed_samples=timing.samples,
                io=timing.io,
                fb=timing.fb,
                wu=timing.wu,
                sent=sent - self._sent_before,
                stop=int(self._context.env.stop_requested),
                save=int(self._is_time_to_save()),
            )
        )
        self._sent_before = sent

    def _receive(self) -> None:
        """Read the reports of the oldest step and act on them."""
        reports = self._reports.receive()
        self._refuse_non_finite(reports)
        self._stopping = self._stopping or any(report.stop for report in reports)
        self._is_due = self._is_due or any(report.save for report in reports)
        self._rebalance(reports)
        entry = entry_of(reports)
        self._history.add(entry)
        self._emit(entry.as_step(self._columns))

    def _settle(self) -> None:
        """Receive everything up to this step, so that what is saved or measured now is known to be sound."""
        while self._unsent:
            self._send()
        while len(self._reports):
            self._receive()

    def _refuse_non_finite(self, reports: Sequence[StepReport]) -> None:
        for report, node in zip(reports, self._group.nodes, strict=True):
            if not math.isfinite(report.loss):
                self._emit_all(self._writer.wait())
                kept = self._checkpoints
                advice = "" if kept.is_empty else f"; the last good checkpoint is {kept.latest()[0]}"
                raise NonFiniteLoss(node, report.step, report.loss, advice)

    def _rebalance(self, reports: Sequence[StepReport]) -> None:
        if self._balance is None or self._training.division is None or reports[0].step < self._first + _WARM_UP:
            return
        seconds = [report.computing / self._plan.accumulate for report in reports]
        samples = [-(-report.timed_samples // self._plan.accumulate) for report in reports]
        decision = self._balance.observe(samples, seconds).decide()
        self._balance = decision.balance
        if decision.shares is None:
            return
        start = reports[0].step + 3 + self._lag + Loader.lead(self._config.workers)
        self._training.division.change(start, decision.balance.workers)
        shares = ", ".join(f"{node} {n}" for node, n in zip(self._group.nodes, decision.shares, strict=True))
        message = f"from step {start} on: {shares} (a step {decision.gain / (1 + decision.gain):.0%} shorter)"
        self._emit(Event(step=reports[0].step, kind="rebalanced", message=message))

    def _end_epoch(self, step: int) -> None:
        self._settle()
        epoch = step // self._training.sampler.steps_per_epoch - 1
        if self._context.validation_data is not None:
            self._validate(step, epoch)
        self._save(step)

    def _validate(self, step: int, epoch: int) -> None:
        assert self._context.validation_data is not None
        begin = time.perf_counter()
        count = len(self._context.validation_data)  # type: ignore[arg-type]
        shares = self._plan.replica_samples
        workers = weights_to_workers(shares, [None] * len(shares))
        sizes = self._training.division.parts(step, count) if self._training.division else apportion(count, workers)
        batch = max(1, shares[self._model.replica]) * self._plan.accumulate
        loss, accuracy = evaluate(self._training, sizes, batch)
        seconds = time.perf_counter() - begin
        validation = Validation(step=step, epoch=epoch, loss=loss, accuracy=accuracy, seconds=seconds)
        self._history.validations.append(validation)
        self._emit(validation)
        self._mark = time.perf_counter()

    def _is_time_to_save(self) -> bool:
        """Whether it is, by the clock of the first rank of all."""
        seconds = self._config.checkpoint_seconds
        return self._group.is_leader and seconds is not None and time.monotonic() - self._saved_at >= seconds

    def _save(self, step: int) -> None:
        """The leader copies, and has it written; the others go on and meet it again in the next collective."""
        weights, optimizer = self._model.gather_weights(), self._training.optimizer.gather()
        if self._group.is_leader:
            scheduler, scaler = self._training.scheduler, self._context.arithmetic.scaler
            self._writer.submit(Checkpoint.of(self._state(step), weights, optimizer, scheduler, scaler))
        self._is_due, self._saved_at = False, time.monotonic()
        self._mark = time.perf_counter()

    def _stop(self, step: int) -> None:
        self._settle()
        self._save(step)
        self._emit_all(self._writer.wait())
        self._emit(Event(step=step, kind="interrupted", message=f"asked to stop after step {step}"))
        self._group.barrier()
        raise Interrupted(
            f"stopped after step {step} as asked; go on with --resume --checkpoint {self._config.checkpoint_folder}"
        )

    def _state(self, step: int) -> CheckpointState:
        plan, context = self._plan, self._context
        return CheckpointState(
            task=context.task.name,
            step=step,
            seed=context.seed,
            batch_size=context.batch_size,
            accumulate=plan.loaded_micro_batches,
            samples=context.num_samples,
            precision=context.arithmetic.precision,
            parts=None if self._training.division else [a.samples for a in plan.assignments],
        )

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._emit(event)

    def _emit(self, what: Step | Validation | Event) -> None:
        if isinstance(what, Event):
            self._history.events.append(what)
        if self._group.is_leader:
            self._context.env.notify(what)
