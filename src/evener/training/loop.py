"""The loop of one rank, from the first step to the record. Every rank comes to the same decisions.

for step in steps:
    one optimiser step
    report to the others how it went; receive, one step late, how it went everywhere
    non-finite loss? asked to stop? shares to be moved?
    at the end of an epoch: validation, checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from evener.config.run_config import RunConfig
from evener.data.loader import Loader, seed_all
from evener.oracle.apportion import NodeCost, apportion, weights_to_workers
from evener.records.events import Phase
from evener.training.attributes import Attributes
from evener.training.checkpoint import CheckpointState
from evener.training.saving import Saving
from evener.training.session import TrainingSession
from evener.training.step import TrainStep, evaluate
from evener.training.training import Training


class Loop:
    """The state of one rank's loop; `run` goes through it, `one_step` performs a single step of it.

    Args:
        training: of this rank.
        config: says where and when to write checkpoints, whether to go on from one, and how to load data.
        fence: called before the weights are changed.
        is_followed: whether other ranks are to take part after this step.
        keep: (step) -> whether its gradients are saved, because this rank does not have the weights yet.
        is_behind: whether this rank does not have the weights yet.

    Attributes:
        last: step that the weights contain.
        saving: of its checkpoints.
        session: of this rank.
        monitor: of the steps.
    """

    def __init__(
        self,
        training: Training,
        config: RunConfig,
        fence: Callable[[], None] | None = None,
        is_followed: Callable[[], bool] = bool,
        keep: Callable[[int], bool] = lambda _: False,
        is_behind: Callable[[], bool] = bool,
    ) -> None:
        self._training, self._context, self._config = training, training.context, config
        self._group, self._model, self._plan = training.group, training.model, training.plan
        self._fence, self._keep, self._step = fence, keep, TrainStep(training, fence, keep)
        self.last, self._attributes = 0, Attributes(training.owners)
        self.saving = Saving(
            config,
            self._group,
            model=self._model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            scaler=self._context.arithmetic.scaler,
            attributes=self._attributes,
            state=self.state,
            emit=lambda event: self.monitor.emit(event),
        )
        self.session = TrainingSession(
            self._context.env,
            self._group,
            self._plan,
            division=training.division,
            balance=training.balance,
            micro_batches=self._plan.accumulate,
            lead=Loader.lead(config.workers),
            saving=self.saving,
            is_followed=is_followed,
            is_behind=is_behind,
        )
        self.monitor = self.session.monitor

    def regroup(
        self, training: Training, nodes: Sequence[str], catching_up: Mapping[int, NodeCost] | None = None
    ) -> None:
        """Continue with other ranks.

        Args:
            training: with the plan, the samples, and the model, or this rank's part of it, of these ranks.
            nodes: of the whole run.
            catching_up: see `Monitor`.
        """
        assert training.division is not None
        self._training, self._plan, self._model = training, training.plan, training.model
        self._step = TrainStep(training, self._fence, self._keep)
        self._attributes.rebind(training.owners)
        self.saving.rebuild(training.model, training.optimizer, training.scheduler)
        self.monitor.regroup(training.division, training.balance, nodes, catching_up or {})

    def run(self) -> None:
        """Perform all steps, from the first or the checkpoint.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite; checkpoints are left as they were.
            Interrupted: a rank was asked to stop; a checkpoint is written.
        """
        first = self.start()
        loader = self.loader(first)
        self.session.start(first)
        with self.saving.writing():
            for step in range(first, self._training.num_steps + 1):
                self.one_step(step, loader)
                if self.after_step(step):
                    break

    def after_step(self, step: int) -> bool:
        """Validate and save after `step`, if due; return whether a callback ends the run here.

        Raises:
            Interrupted: a rank was asked to stop.
        """
        if step % self._training.sampler.steps_per_epoch:
            self.session.save_if_due(step)
            return False
        is_over = self._end_epoch(step)
        self.session.stop_if_asked(step)
        return is_over

    def is_plain(self, step: int) -> bool:
        """Return whether neither validation nor checkpoint follows `step`, which is made."""
        is_saved = self.monitor.is_saving or self.monitor.is_stopping or self.saving.is_due(step)
        return step % self._training.sampler.steps_per_epoch != 0 and not is_saved

    def loader(self, first: int) -> Loader:
        """Return a loader of batches from step `first` on."""
        return Loader(
            self._context.train_data,
            self._training.sampler,
            first=first,
            last=self._training.num_steps,
            device=self._group.device,
            seed=self._context.seed,
            workers=self._config.workers,
        )

    def start(self) -> int:
        """Load the checkpoint, if any, and return the first step to perform; the leader announces the total."""
        self._model.train()
        self.last = self.saving.resume(self._context.epochs, self._training.sampler.steps_per_epoch)
        first, context = self.last + 1, self._context
        if self._group.is_leader:
            total, done = context.epochs * context.num_samples, (first - 1) * context.batch_size
            context.env.notify(Phase(what="training", num_samples=total, done=min(done, total), epochs=context.epochs))
        return first

    def one_step(self, step: int, loader: Loader) -> None:
        """Perform `step`, the loader's next, report it, and receive the reports of the step before."""
        self.session.begin_step(step)
        seed_all(self._context.seed, step, stream=self._model.rng_stream, device=self._group.device)
        result = self._step(loader)
        self.last = step
        self.session.end_step(step, result)

    def finish_step(self, step: int) -> None:
        """Make the update of `step`, whose gradients are complete on all ranks; no rank has reported it."""
        self._step.change(step)
        self.last = step

    def _end_epoch(self, step: int) -> bool:
        """Validate and save; return whether a callback ends the run here."""
        self.monitor.settle()
        epoch = step // self._training.sampler.steps_per_epoch - 1
        if self._context.validation_data is not None:
            self._validate(step, epoch)
        self.session.save(step)
        is_over = self.monitor.is_over(step, epoch)
        self.monitor.restart_clock()
        return is_over

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
        self.session.validated(step=step, epoch=epoch, loss=loss, accuracy=accuracy, seconds=seconds)

    def state(self, step: int) -> CheckpointState:
        """Return the part of a checkpoint after `step` that is not tensors."""
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
            attributes=self._attributes.changed(),
            unsaved=self._attributes.unsaved(),
        )
