"""Tasks that users write: a Task or BatchTask in PyTorch, a ThinTask without it. This module imports no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from evener.records.errors import require

_MAX_NAME = 200

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from evener import autodiff


def _require_sizes(kind: str, task: Task | BatchTask | ThinTask) -> None:
    """Raise InvalidValue unless the fields that all kinds of tasks have are of their types and positive."""
    for name in ("batch_size", "epochs"):
        value = getattr(task, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        require(is_count, f"{kind}.{name}", value, "a positive whole number")
    is_name = isinstance(task.name, str) and task.name.isprintable() and 0 < len(task.name) <= _MAX_NAME
    require(is_name, f"{kind}.name", task.name, f"text that can be printed, of at most {_MAX_NAME} characters")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, a loss and data; the rest has defaults.

    Everything is a function without arguments (or with those named), because every rank calls it for itself.

    Attributes:
        name: name in tables and files.
        model: makes the model, on the CPU; weights follow `--seed`.
        loss: (outputs, targets) -> mean loss over the samples of the batch, a scalar.
        train_data: makes a map-style data set of (inputs, target) pairs. Inputs may be a tensor, or a tuple or a dict
            of tensors, which the model then takes as positional or named arguments. It may have a `collate_fn`, which
            makes (inputs, targets) of a list of samples, and `set_epoch`, which is called before samples of another
            epoch are read.
        validation_data: makes the validation data, in the same form; None for no validation.
        optimizer: parameters -> optimizer; SGD with lr 0.1, momentum 0.9 by default.
        scheduler: (optimizer, number of steps of the run) -> learning-rate schedule, stepped after every step.
        batch_size: samples of one optimizer step over all nodes together; the result does not depend on their number.
        epochs: passes over the training data.
        correct: (outputs, targets) -> number of correct samples, a scalar; the arg-max by default. `None` for tasks
            without accuracy.
        labels: makes the class of every training sample, as integers, for class-balanced fixed shares of the data; by
            default taken from the data set (`targets`, or the second tensor of a TensorDataset).
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
        for name in ("model", "loss", "train_data"):
            require(callable(getattr(self, name)), f"Task.{name}", getattr(self, name), "a function")
        made = hasattr(self.model, "named_parameters") and not isinstance(self.model, type)
        require(not made, "Task.model", self.model, "a function that makes the model, such as lambda: MyModel()")
        for name in ("validation_data", "optimizer", "scheduler", "labels"):
            value = getattr(self, name)
            require(value is None or callable(value), f"Task.{name}", value, "a function or None")
        _require_sizes("Task", self)
        ok = self.correct is None or self.correct == "argmax" or callable(self.correct)
        require(ok, "Task.correct", self.correct, "a function, 'argmax' or None")
        is_norm = self.clip_norm is None or (isinstance(self.clip_norm, int | float) and self.clip_norm > 0)
        require(is_norm, "Task.clip_norm", self.clip_norm, "positive or None")


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """A model, a loss of model and batch, and data of any kind: a training program without its loop.

    A Task describes its model's inputs, so that layers and stages may be divided, too; of a BatchTask nodes divide the
    samples of every batch.

    Attributes:
        name: name in tables and files.
        model: makes the model, on the CPU; weights follow `--seed`.
        loss: (model, batch) -> mean loss over the samples, or over `count`; or (numerator, denominator): the loss of a
            batch is then the sum of all numerators by that of all denominators.
        train_data: makes a map-style data set, or a stream (an IterableDataset) that is the same on all nodes.
        collate: list of samples -> batch, which may be anything; by default PyTorch's.
        count: number over which the loss is a mean: "samples", "sum" if it is no mean, or batch -> a number, such as of
            tokens.
        validation_data: makes the validation data, as train_data; None for none.
        metrics: name -> (model, batch) -> mean over the samples, or (sum, number); over the validation data.
        validate: (model, run) -> numbers by name, after every epoch on all nodes, which exchange values by `run.sum`
            and `run.gather`; a `loss` among them is that of the validation.
        optimizer: model -> optimizer, whose step may call its closure more than once; SGD with lr 0.1, momentum 0.9 by
            default.
        scheduler: (optimizer, number of steps of the run) -> learning-rate schedule, stepped after every step; or a
            ReduceLROnPlateau, stepped after every epoch with the loss of the validation, or of the training.
        batch_size: samples of one optimizer step over all nodes together.
        epochs: passes over the training data.
        clip_norm: bound on the norm of the whole gradient; None for none.
    """

    name: str = "task"
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    train_data: Callable[[], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None
    count: Literal["samples", "sum"] | Callable[[Any], Any] = "samples"
    validation_data: Callable[[], Dataset[Any]] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    validate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    scheduler: Callable[[Optimizer, int], Any] | None = None
    batch_size: int = 64
    epochs: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "train_data"):
            require(callable(getattr(self, name)), f"BatchTask.{name}", getattr(self, name), "a function")
        for name in ("collate", "validation_data", "validate", "optimizer", "scheduler"):
            value = getattr(self, name)
            require(value is None or callable(value), f"BatchTask.{name}", value, "a function or None")
        is_count = self.count in ("samples", "sum") or callable(self.count)
        require(is_count, "BatchTask.count", self.count, "'samples', 'sum' or a function of a batch")
        are_named = isinstance(self.metrics, Mapping) and all(isinstance(name, str) for name in self.metrics)
        require(are_named, "BatchTask.metrics", self.metrics, "a dict from names to functions")
        for name, metric in self.metrics.items():
            require(callable(metric), f"BatchTask.metrics[{name!r}]", metric, "a function of the model and a batch")
        needs = not self.metrics or self.validation_data is not None
        require(needs, "BatchTask.validation_data", self.validation_data, "a function where there are metrics")
        _require_sizes("BatchTask", self)
        is_norm = self.clip_norm is None or (isinstance(self.clip_norm, int | float) and self.clip_norm > 0)
        require(is_norm, "BatchTask.clip_norm", self.clip_norm, "positive or None")


@dataclass(frozen=True, kw_only=True)
class ThinTask:
    """A task for the thin engine: a model of `evener.autodiff`, and arrays.

    If a Task of the same name exists, both train in one run: the states of their models then have the same names,
    shapes and order, and the same samples have the same numbers.

    Attributes:
        name: name in tables and files.
        model: makes the model; weights follow `autodiff.manual_seed`.
        loss: (outputs, targets) -> mean loss over the samples of the batch, a scalar.
        train_data: makes the arrays (inputs, targets), one sample after the other in both.
        validation_data: makes the validation arrays; None for no validation.
        optimizer: parameters -> optimizer, whose `lr` is that of the peak of `rate`.
        rate: (step from 0, number of steps of the run) -> learning rate, as a share of the optimizer's; None: constant.
        batch_size: samples of one optimizer step over all nodes together.
        epochs: passes over the training data.
        has_accuracy: whether targets are classes, and a sample is correct if its largest output is that of its class.
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
        for name in ("model", "loss", "train_data", "optimizer"):
            require(callable(getattr(self, name)), f"ThinTask.{name}", getattr(self, name), "a function")
        for name in ("validation_data", "rate"):
            value = getattr(self, name)
            require(value is None or callable(value), f"ThinTask.{name}", value, "a function or None")
        _require_sizes("ThinTask", self)
