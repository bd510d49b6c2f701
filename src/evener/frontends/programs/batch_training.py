"""The training of a BatchTask: a training loop whose batches the nodes divide.

for epoch in range(first, n):              # 0, or the epoch of the checkpoint
    for batch in loader:
        optimizer.step(closure)            # clears gradients, computes the loss, goes backward, clips
        scheduler.step()
        checkpoint due? stop requested?
    validate, write a checkpoint; ends here?
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from evener.config.conflicts import refuse_options
from evener.config.run_config import RunConfig, require_samples
from evener.data.loader import SeededSamples, sample_count, sample_seeds, seed_all, to_device
from evener.data.tasks.load import load_any_task
from evener.frontends.programs.batch_check import begin_batch_check
from evener.frontends.programs.batch_loss import BatchLoss
from evener.frontends.programs.batch_validation import validate
from evener.frontends.programs.cpu_check import begin_cpu_check, is_cpu_check
from evener.frontends.programs.entry import end_copy, finish
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.rank_environment import RankEnvironment
from evener.parallel.op_registry import without_synchronised
from evener.records.errors import InvalidInput, first_line, noting
from evener.records.task import BatchTask
from evener.training.attributes import Attributes, owners_of
from evener.training.checkpoint import CheckpointState, require_writable, write_weights
from evener.training.context import Arithmetic, join_run
from evener.training.lone_sample import device_of, refuse_lone_sample
from evener.training.saving import Saving


def train_batches(env: RankEnvironment, config: RunConfig, task: BatchTask | None = None) -> None:
    """Run one rank; the leader writes the weights and emits the record through `env`.

    Args:
        env: of the rank.
        config: options of the run.
        task: to be trained; None for the task that `config` names.
    """
    group, config = join_run(env, config)
    batch_task = task or load_any_task(config.task, config.data, config.option)
    assert isinstance(batch_task, BatchTask)
    run = Run(env, group, ScriptConfig(script=Path(batch_task.name), shares=config.shares, started=config.started))
    run.equivalence_check.is_wanted = run.equivalence_check.is_wanted and config.check
    if is_cpu_check():
        begin_cpu_check()
    else:
        begin_batch_check(run, train_batches, config, task)
    try:
        training = BatchTraining(run, batch_task, config)
        training.train()
    except BaseException as error:
        end_copy(run, error)
        raise
    end_copy(run, None)
    if run.leader:
        write_weights(run.state(training.model), config.folder)
    finish(run, env, task=batch_task.name, seed=config.seed, epochs=training.epochs, precision=config.precision)


_STEP = "optimizer, in its step"
_NOT_FOR_BATCHES = (
    "replicas", "micro_batches", "schedule", "rematerialise", "plan", "compile", "accumulate", "stationary",
)  # fmt: skip
_NOT_ELASTIC = (
    "its optimiser may change weights several times a step, so that a step that was broken off cannot be done again; "
    "--resume goes on from the last checkpoint"
)


def refuse_batches(config: RunConfig) -> None:
    """Raise InvalidInput for what does not go with a BatchTask."""
    advice = "its batches are divided, and nothing else; a Task may have it"
    refuse_options(config, _NOT_FOR_BATCHES, "a BatchTask", advice)
    refuse_options(config, ("elastic",) if config.elastic else (), "a BatchTask", _NOT_ELASTIC)
    if config.strategy not in ("auto", "data"):
        raise InvalidInput(f"--strategy {config.strategy} does not go with a BatchTask: {advice}")
    if config.precision == "fp16":
        raise InvalidInput("--precision fp16 does not go with a BatchTask: take bf16")


class BatchTraining:
    """A rank's part of the training of a BatchTask.

    Args:
        run: of its nodes.
        task: to be trained.
        config: options of the run.

    Raises:
        InvalidInput: the task or an option is invalid.
    """

    def __init__(self, run: Run, task: BatchTask, config: RunConfig) -> None:
        self._run, self._task, self._config = run, task, config
        self._arithmetic = Arithmetic(config.precision, run.device)
        batch_size, self.epochs = config.sizes_of(task)
        self._batch_size = batch_size
        seed_all(config.seed)
        model = require_writable(self._arithmetic.prepare_model(without_synchronised(task.model())))
        self._samples, validation = task.train_data(), task.validation_data() if task.validation_data else None
        if not isinstance(self._samples, IterableDataset | TensorDataset):
            self._samples = SeededSamples(self._samples, config.seed)
        self._draw = torch.Generator()
        loaders = [self._loader(self._samples, batch_size, self._draw)]
        if validation is not None:
            loaders.append(self._loader(validation, batch_size, None))
        self._refuse_lone_sample(model, batch_size)
        optimizer = task.optimizer(model) if task.optimizer else SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared = run.prepare(model, optimizer, *loaders, count=task.count)
        self.model: nn.Module = prepared[0]
        self._optimizer: Optimizer = prepared[1]
        self._batches, self._validation = prepared[2], prepared[3:]
        self._loss = BatchLoss(run, task, self.model, self._arithmetic, batch_size)
        self._steps_per_epoch = self._known_steps()
        self._scheduler = self._make_scheduler()
        self._saving = run.steps.saving = self._make_saving(batch_size)

    def train(self) -> None:
        """Train all epochs, or fewer if a callback ends the run.

        Raises:
            InvalidInput: the checkpoint belongs to another run.
            Interrupted: a rank was asked to stop.
        """
        done = self._saving.resume(self.epochs, self._steps_for("--resume")) if self._saving else 0
        first, skipped = divmod(done, self._steps_per_epoch or 1)
        self._run.steps.number = done
        if first >= self.epochs:
            self._run.steps.resume_complete(self._batch_size)
        with self._writing():
            for epoch in range(first, self.epochs):
                self._begin_epoch(epoch, skipped if epoch == first else 0)
                self._one_epoch()
                self._end_epoch(epoch)
                if self._run.steps.is_over():
                    return

    def _begin_epoch(self, epoch: int, skipped: int) -> None:
        """Seed the order and all random numbers by seed and epoch, so that a resumed run draws the same."""
        self._run.begin_epoch(epoch, is_last=epoch + 1 == self.epochs)
        self._draw.manual_seed(int(sample_seeds(self._config.seed, epoch, np.zeros(1, dtype=np.int64))[0]))
        if isinstance(self._samples, SeededSamples):
            self._samples.epoch = epoch
        self._batches.skip = skipped

    def _one_epoch(self) -> None:
        steps = self._run.steps
        self.model.train()
        for batch in self._batches:
            self._run.seed_draws(self._config.seed, steps.number)
            self._update(self._placed(batch))
            if self._scheduler is not None and not self._follows_validation:
                with noting("scheduler, at its step"):
                    self._scheduler.step()
            if self._steps_per_epoch and steps.number % self._steps_per_epoch:  # else after the validation
                steps.save_if_due()

    def _end_epoch(self, epoch: int) -> None:
        steps = self._run.steps.number - epoch * (self._steps_per_epoch or 0)
        if self._saving and steps != self._steps_per_epoch:
            raise InvalidInput(
                f"the data say by their length that an epoch has {self._steps_per_epoch} steps, and it had {steps}: "
                "a checkpoint could not say where to go on; correct their __len__, or leave it out"
            )
        loss = validate(self._run, self._task, self.model, self._validation, self._placed, self._loss)
        if self._scheduler is not None and self._follows_validation:
            with noting("scheduler, at its step"):
                self._scheduler.step(self._run.steps.last_loss() if loss is None else loss)
        self._run.steps.save()

    def _writing(self) -> AbstractContextManager[None]:
        return self._saving.writing() if self._saving else nullcontext()

    def _make_scheduler(self) -> Any:
        if self._task.scheduler is None:
            return None
        return self._task.scheduler(self._optimizer, self.epochs * self._steps_for("BatchTask.scheduler"))

    def _make_saving(self, batch_size: int) -> Saving | None:
        """Return the writer of checkpoints; None for a stream of unknown length, unless checkpoints are requested."""
        is_requested = self._config.checkpoint or self._config.checkpoint_every or self._config.resume
        if self._steps_per_epoch is None and not is_requested:
            return None
        self._steps_for("--checkpoint")
        return saving_of(
            self._run,
            self._config,
            self._task,
            model=self.model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            arithmetic=self._arithmetic,
            batch_size=batch_size,
            samples=len(self._batches.dataset),
        )

    @property
    def _follows_validation(self) -> bool:
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def _known_steps(self) -> int | None:
        """Return the steps per epoch; None for a stream without a length."""
        try:
            return len(self._batches)
        except TypeError:
            return None

    def _steps_for(self, what: str) -> int:
        """Return the steps per epoch. Raises InvalidInput if `what` needs it and it is unknown."""
        if self._steps_per_epoch is None:
            raise InvalidInput(
                f"{what} needs the number of steps, and the data are a stream without a length: "
                "give their class a __len__"
            )
        return self._steps_per_epoch

    def _refuse_lone_sample(self, model: nn.Module, batch_size: int) -> None:
        if isinstance(self._samples, IterableDataset):
            return
        one = DataLoader(self._samples, collate_fn=self._task.collate or _collate, generator=torch.Generator())

        def forward(trial: nn.Module) -> object:
            return self._task.loss(trial, to_device(self._arithmetic.prepare(next(iter(one))), device_of(trial)))

        refuse_lone_sample(model, forward, samples=sample_count(self._samples), batch_size=batch_size)

    def _loader(self, data: Dataset[Any], batch_size: int, draw: torch.Generator | None) -> DataLoader[Any]:
        """Return a loader of training data, shuffled by `draw`; without `draw`, one of validation data."""
        settings: dict[str, Any] = {"batch_size": batch_size, "num_workers": self._config.workers}
        if not isinstance(data, IterableDataset):
            require_samples(1 if draw is None else batch_size, sample_count(data))
            settings["shuffle"] = draw is not None
        generator = torch.Generator().manual_seed(self._config.seed) if draw is None else draw
        return DataLoader(data, collate_fn=self._task.collate or _collate, generator=generator, **settings)

    def _placed(self, batch: Any) -> Any:
        return self._arithmetic.prepare(to_device(batch, self._run.device))

    def _update(self, batch: Any) -> None:
        """Make the optimizer's step. Raises InvalidInput if it does not call the closure that it takes."""
        num_calls = 0

        def closure() -> Any:
            """Compute the gradients of `batch`; an optimizer may call this several times."""
            nonlocal num_calls
            num_calls += 1
            self._optimizer.zero_grad()
            loss = self._loss(batch)
            torch.autograd.backward(loss)
            if self._task.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._task.clip_norm)
            self._run.note_loss(loss)
            return loss if _uses_loss(self._optimizer) else None  # for a loss the nodes would wait for each other

        if not inspect.signature(self._optimizer.step).parameters:
            closure()
            with noting(_STEP):
                self._optimizer.step()
            return
        cause = None
        try:
            with noting(_STEP):
                self._optimizer.step(closure)
        except (TypeError, AttributeError, RuntimeError) as error:  # such as of gradients that are None
            if num_calls:
                raise
            cause = error
        if not num_calls:
            raise InvalidInput(
                f"the task's optimizer, {type(self._optimizer).__name__}, does not call the closure that its step "
                f"takes, so it has no gradients{f' ({first_line(cause)})' if cause else ''}: call it first "
                "(with torch.enable_grad(): loss = closure()), as PyTorch's optimizers do, or let step take no argument"
            ) from cause


def _uses_loss(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step may compute with the loss of its closure; PyTorch's own only return it."""
    return not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS)


def _collate(samples: list[Any]) -> Any:
    with noting("data, whose samples do not become one batch without a BatchTask.collate"):
        return default_collate(samples)


class SameModel:
    """A WholeModel that every rank holds."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run, self._model = run, model

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the weights."""
        return self._run.state(self._model)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights."""
        try:
            self._model.load_state_dict(weights)
        except RuntimeError as error:
            raise InvalidInput(first_line(error)) from error


class SameOptimizer:
    """The WholeOptimizer of a model that every rank holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def gather(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self._optimizer.state_dict()

    def load(self, whole: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        try:
            self._optimizer.load_state_dict(whole)
        except ValueError as error:
            raise InvalidInput(first_line(error)) from error


def saving_of(
    run: Run,
    config: RunConfig,
    task: BatchTask,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    arithmetic: Arithmetic,
    batch_size: int,
    samples: int,
) -> Saving:
    """Return the checkpoints of a training of `task`.

    Args:
        run: of its nodes.
        config: options of the run.
        task: that is trained.
        model: of all nodes.
        optimizer: of all nodes.
        scheduler: of the learning rate, if there is one.
        arithmetic: precision of the training.
        batch_size: samples of a step.
        samples: in the training data.
    """

    attributes = Attributes(owners_of(model, task.loss, optimizer))

    def state(step: int) -> CheckpointState:
        return CheckpointState(
            task=task.name,
            step=step,
            seed=config.seed,
            batch_size=batch_size,
            accumulate=1,
            samples=samples,
            precision=config.precision,
            attributes=attributes.changed(),
            unsaved=attributes.unsaved(),
        )

    return Saving(
        config,
        run.group,
        model=SameModel(run, model),
        optimizer=SameOptimizer(optimizer),
        scheduler=scheduler,
        scaler=arithmetic.scaler,
        attributes=attributes,
        state=state,
        emit=lambda event: run.steps.tell([event]),
    )
