"""Checkpoints of a BatchTask; `training/saving.py` writes them and resumes from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evener.config.run_config import RunConfig
from evener.frontends.programs.session import Run
from evener.records.errors import InvalidInput, first_line
from evener.records.task import BatchTask
from evener.training.attributes import Attributes, owners_of
from evener.training.checkpoint import CheckpointState
from evener.training.context import Arithmetic
from evener.training.saving import Saving


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
