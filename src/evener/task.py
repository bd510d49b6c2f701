"""What a user writes: a Task in plain PyTorch, a ThinTask for machines without it. Importing this needs neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.errors import require

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from evener import autodiff


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, a loss and data; the rest has defaults.

    Everything is a function without arguments (or with those named), because every rank calls it for itself.

    Attributes:
        name: in tables and files.
        model: makes the model, on the CPU; weights follow `--seed`.
        loss: (outputs, targets) -> mean loss over the samples of the batch, a scalar.
        train_data: makes a map-style data set of (inputs, target) pairs. Inputs may be a tensor, or a tuple or a
            dict of tensors, which the model then takes as positional or named arguments. It may have a `collate_fn`,
            which makes (inputs, targets) of a list of samples, and `set_epoch`, which is called before samples of
            another epoch are asked for.
        validation_data: likewise; None for no validation.
        optimizer: parameters -> optimiser; SGD with lr 0.1, momentum 0.9 by default.
        scheduler: (optimiser, number of steps of the run) -> learning-rate schedule, stepped after every step.
        batch_size: samples of one optimiser step over all nodes together; the result does not depend on their number.
        epochs: passes over the training data.
        correct: (outputs, targets) -> number of samples that are right, a scalar; the arg-max by default.
            `None` for tasks without accuracy.
        labels: makes the class of every training sample, as integers, for class-balanced shares of data that stays
            where it is; by default taken from the data set (`targets`, or the second tensor of a TensorDataset).
        clip_norm: bound on the norm of the whole gradient; None for none.
    """

    name: str = "task"
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train_data: Callable[[], Dataset[Any]]
    validation_data: Callable[[], Dataset[Any]] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    scheduler: Callable[[Optimizer, int], LRScheduler] | None = None
    batch_size: int = 64
    epochs: int = 1
    correct: Callable[[Any, Any], Tensor] | str | None = "argmax"
    labels: Callable[[], Any] | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for field in ("model", "loss", "train_data"):
            require(callable(getattr(self, field)), f"Task.{field}", getattr(self, field), "a function")
        made = hasattr(self.model, "named_parameters") and not isinstance(self.model, type)
        require(not made, "Task.model", self.model, "a function that makes the model, such as lambda: MyModel()")
        for field in ("validation_data", "optimizer", "scheduler", "labels"):
            value = getattr(self, field)
            require(value is None or callable(value), f"Task.{field}", value, "a function or None")
        require(self.batch_size > 0, "Task.batch_size", self.batch_size, "positive")
        require(self.epochs > 0, "Task.epochs", self.epochs, "positive")
        ok = self.correct is None or self.correct == "argmax" or callable(self.correct)
        require(ok, "Task.correct", self.correct, "a function, 'argmax' or None")
        require(self.clip_norm is None or self.clip_norm > 0, "Task.clip_norm", self.clip_norm, "positive or None")


@dataclass(frozen=True, kw_only=True)
class ThinTask:
    """The same for the thin engine: a model of `evener.autodiff`, and arrays.

    Where a Task of the same name exists, both train in one run: the states of their models then have the same names,
    shapes and order, and the same samples have the same numbers.

    Attributes:
        name: in tables and files.
        model: makes the model; weights follow `autodiff.manual_seed`.
        loss: (outputs, targets) -> mean loss over the samples of the batch, a scalar.
        train_data: makes the arrays (inputs, targets), one sample after the other in both.
        validation_data: likewise; None for no validation.
        optimizer: parameters -> optimiser, whose `lr` is that of the peak of `rate`.
        rate: (step from 0, number of steps of the run) -> learning rate, as a share of the optimiser's; None for all.
        batch_size: samples of one optimiser step over all nodes together.
        epochs: passes over the training data.
        has_accuracy: whether targets are classes, and a sample is right if its largest output is that of its class.
    """

    name: str = "task"
    model: Callable[[], autodiff.nn.Module]
    loss: Callable[[Any, Any], autodiff.Tensor]
    train_data: Callable[[], tuple[NDArray[Any], NDArray[Any]]]
    validation_data: Callable[[], tuple[NDArray[Any], NDArray[Any]]] | None = None
    optimizer: Callable[[Iterable[Any]], autodiff.optim.Optimizer]
    rate: Callable[[int, int], float] | None = None
    batch_size: int = 64
    epochs: int = 1
    has_accuracy: bool = True

    def __post_init__(self) -> None:
        for field in ("model", "loss", "train_data", "optimizer"):
            require(callable(getattr(self, field)), f"ThinTask.{field}", getattr(self, field), "a function")
        for field in ("validation_data", "rate"):
            value = getattr(self, field)
            require(value is None or callable(value), f"ThinTask.{field}", value, "a function or None")
        require(self.batch_size > 0, "ThinTask.batch_size", self.batch_size, "positive")
        require(self.epochs > 0, "ThinTask.epochs", self.epochs, "positive")
