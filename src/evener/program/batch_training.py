"""The training of a BatchTask: a program of five lines, written once, on nodes that divide every batch.

for epoch in run.epochs(n):
    for batch in loader:
        optimizer.step(closure)            # clears gradients, computes the loss, goes backward, clips
        scheduler.step()
    validate; ends here?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evener.data.loader import seed_all, to_device
from evener.errors import InvalidInput
from evener.launch.rank_environment import RankEnvironment
from evener.parallel.op_registry import without_synchronised
from evener.program.batch_loss import BatchLoss
from evener.program.batch_validation import validate
from evener.program.joining import end_copy, finish
from evener.program.options import ScriptConfig
from evener.program.session import Run
from evener.run.config import RunConfig, require_samples
from evener.run.conflicts import refuse_options
from evener.run.context import Arithmetic, join_run
from evener.run.rank import write_weights
from evener.task import BatchTask
from evener.tasks.load import load_any_task


def train_batches(env: RankEnvironment, config: RunConfig, task: BatchTask | None = None) -> None:
    """One rank's whole way; the leader writes the weights, and emits the record through the env.

    Args:
        env: of the rank.
        config: what is asked for.
        task: to be trained; None: the one that `config` names.
    """
    group, config = join_run(env, config)
    found = task or load_any_task(config.task, config.data, config.option)
    assert isinstance(found, BatchTask)
    run = Run(env, group, ScriptConfig(script=Path(found.name), shares=config.shares, started=config.started))
    run.rehearsal.is_wanted = run.rehearsal.is_wanted and config.check
    try:
        training = BatchTraining(run, found, config)
        training.train()
    except BaseException as error:
        end_copy(run, error)
        raise
    end_copy(run, None)
    if run.leader:
        write_weights(run.state(training.model), config.folder)
    finish(run, env, task=found.name, seed=config.seed, epochs=training.epochs, precision=config.precision)


_NOT_FOR_BATCHES = (
    "replicas", "micro_batches", "schedule", "rematerialise", "plan", "compile", "accumulate", "stationary",
    "checkpoint", "checkpoint_every", "resume",
)  # fmt: skip


def refuse_batches(config: RunConfig) -> None:
    """Raise InvalidInput for what does not go with a BatchTask."""
    advice = "its batches are divided, and nothing else; a Task may have it"
    refuse_options(config, _NOT_FOR_BATCHES + (("elastic",) if config.elastic else ()), "a BatchTask", advice)
    if config.strategy not in ("auto", "data"):
        raise InvalidInput(f"--strategy {config.strategy} does not go with a BatchTask: {advice}")
    if config.precision == "fp16":
        raise InvalidInput("--precision fp16 does not go with a BatchTask: take bf16")


class BatchTraining:
    """A rank's part of the training of a BatchTask.

    Args:
        run: of its nodes.
        task: to be trained.
        config: what is asked for.

    Raises:
        InvalidInput: the task, or what was asked of it, is wrong.
    """

    def __init__(self, run: Run, task: BatchTask, config: RunConfig) -> None:
        self._run, self._task, self._config = run, task, config
        self._arithmetic = Arithmetic(config.precision, run.device)
        batch_size, self.epochs = config.sizes_of(task)
        seed_all(config.seed)
        model = self._arithmetic.prepare_model(without_synchronised(task.model()))
        train, validation = task.train_data(), task.validation_data() if task.validation_data else None
        loaders = [self._loader(train, batch_size, True)]
        if validation is not None:
            loaders.append(self._loader(validation, batch_size, False))
        optimizer = task.optimizer(model) if task.optimizer else SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared = run.prepare(model, optimizer, *loaders, count=task.count)  # type: ignore[arg-type]
        self.model: nn.Module = prepared[0]
        self._optimizer: Optimizer = prepared[1]
        self._batches, self._validation = prepared[2], prepared[3:]
        self._loss = BatchLoss(run, task, self.model, self._arithmetic, batch_size)
        self._scheduler = task.scheduler(self._optimizer, self._num_steps()) if task.scheduler else None

    def train(self) -> None:
        """Go through all epochs, or to the end of the one that whoever watches calls the last."""
        for _ in self._run.epochs(self.epochs):
            self.model.train()
            for batch in self._batches:
                self._optimizer.step(self._closure(self._placed(batch)))
                if self._scheduler is not None and not self._follows_validation:
                    self._scheduler.step()
            loss = validate(self._run, self._task, self.model, self._validation, self._placed, self._loss)
            if self._scheduler is not None and self._follows_validation:
                self._scheduler.step(self._run.steps.last_loss() if loss is None else loss)
            if self._run.steps.is_over():
                return

    @property
    def _follows_validation(self) -> bool:
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def _num_steps(self) -> int:
        try:
            return self.epochs * len(self._batches)
        except TypeError as error:
            raise InvalidInput(
                "BatchTask.scheduler needs the number of steps, and the data are a stream without a length: "
                "give their class a __len__"
            ) from error

    def _loader(self, data: Dataset[Any], batch_size: int, is_training: bool) -> DataLoader[Any]:
        words: dict[str, Any] = {"batch_size": batch_size, "num_workers": self._config.workers}
        if not isinstance(data, IterableDataset):
            require_samples(batch_size if is_training else 1, len(data))  # type: ignore[arg-type]
            words["shuffle"] = is_training
        draw = torch.Generator().manual_seed(self._config.seed)
        return DataLoader(data, collate_fn=self._task.collate, generator=draw, **words)

    def _placed(self, batch: Any) -> Any:
        return self._arithmetic.prepare(to_device(batch, self._run.device))

    def _closure(self, batch: Any) -> Callable[[], Any]:
        """What an optimiser calls for the gradients of this batch, as often as it likes."""

        def closure() -> Tensor:
            self._optimizer.zero_grad()
            loss = self._loss(batch)
            torch.autograd.backward(loss)
            if self._task.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._task.clip_norm)
            return loss

        return closure
