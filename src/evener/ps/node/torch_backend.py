"""The backend of PyTorch tasks, on a CPU or a GPU; on nodes, only this module and `torch_state` import PyTorch.

Random transforms are the same as in runs with collectives: samples do not depend on the node that computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_weights
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam

from evener.agreements.layout import Flat, flat_of
from evener.agreements.settings import Outer
from evener.data.loader import collect, count_samples, labels_of, seed_all, split_batch, to_device
from evener.parallel.gradient_hooks import copied
from evener.parallel.op_registry import without_synchronised
from evener.parallel.parallel_model import count_correct, require_scalar
from evener.parallel.refusals import refuse_lazy
from evener.ps.node.torch_state import TorchState, layout_of_model, shared_state
from evener.ps.protocol.server_optimizer import group_numbers, server_optimizer
from evener.records.errors import TaskCannot, UnknownOptimizer, require
from evener.records.task import Task
from evener.system import accelerators
from evener.tracer.nested import call

Settings = dict[str, Any]
"""Settings of one group of parameters in one step: `lr`, `momentum`, `betas`, as far as the optimizer has them."""

_SCHEDULED = ("lr", "momentum", "betas")
_KINDS: dict[type[Optimizer], str] = {SGD: "SGD", Adam: "Adam", AdamW: "AdamW"}


class Precision(Protocol):
    """The precision of the computation."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Let operations choose their type inside."""
        ...

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model on its device, with weights of the right type."""
        ...

    def prepare(self, value: Any) -> Any:
        """Return `value` with tensors of the right type."""
        ...


class TorchBackend:
    """A task's model and data on one device; see `ModelBackend`.

    Args:
        task: task to compute.
        seed: seed of the initial weights and of random transforms.
        precision: precision of the computation.
        device: device that computes.
        load: loads the batch of samples [N] in an epoch, from data set, samples, seed and epoch.

    Attributes:
        model: model with the initial weights of `seed`.
        train_data: training data of the task.

    Raises:
        InvalidInput: the data have no length, or the model has no shapes before its first batch.
        UnknownOptimizer: the task's optimizer accepts only sparse gradients.
    """

    def __init__(
        self, task: Task, seed: int, precision: Precision, device: str = "cpu", load: Callable[..., Any] = collect
    ) -> None:
        self._task, self._seed, self._precision, self._device = task, seed, precision, torch.device(device)
        self._load = load
        self.name = task.name
        self.train_data: Any = task.train_data()
        self.num_samples = count_samples(self.train_data)
        self.has_accuracy, self.clip_norm = task.correct is not None, task.clip_norm
        seed_all(seed)
        self.model = precision.prepare_model(without_synchronised(refuse_lazy(task.model())))
        _refuse_sparse(task, self.model)
        self.layout = layout_of_model(self.model)
        fixed = [
            accelerators.wide(one.detach()).abs().sum().item()
            for one in self.model.parameters()
            if not one.requires_grad
        ]
        self.fixed_sum: float | None = float(sum(fixed))
        self.normalises = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        is_accelerator = accelerators.is_accelerator(self._device)
        self.synchronise: Callable[[], None] | None = (
            partial(accelerators.synchronize, self._device) if is_accelerator else None
        )

    def twin(self, precision: Precision, load: Callable[..., Any] = collect) -> TorchBackend:
        """Make another backend of the same data and model, as it is now, which computes in `precision`."""
        task = replace(self._task, model=lambda: copied(self.model), train_data=lambda: self.train_data)
        return TorchBackend(task, self._seed, precision, load=load)

    def samples(self, count: int) -> tuple[Any, Any]:
        """Return inputs and targets of `count` training samples, in the run's precision, on the device."""
        return self._batch(self.train_data, np.arange(count, dtype=np.int64) % self.num_samples, 0)

    @property
    def num_validation(self) -> int:
        """See `ModelBackend`."""
        return 0 if self._validation is None else len(self._validation)

    def labels(self) -> NDArray[Any]:
        """See `ModelBackend`."""
        return np.asarray(self._task.labels()) if self._task.labels else labels_of(self.train_data)

    def initial_weights(self) -> Flat:
        """See `ModelBackend`."""
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in shared_state(self.model).items()}
        return flat_of(self.layout, arrays)

    def server_optimizer(self, num_steps: int) -> Outer:
        """See `ModelBackend`."""
        optimizer = optimizer_of(self._task, self.model.parameters())
        groups = [{name: _number(value) for name, value in group.items()} for group in optimizer.param_groups]
        schedule, named = _schedule_of(self._task, self.model, num_steps), dict(self.model.named_parameters())
        parameters = [named[entry.name] for entry in self.layout.entries if entry.kind == "parameter"]
        numbers = group_numbers(optimizer.param_groups, parameters)
        return server_optimizer(_kind_of(optimizer), groups, schedule, numbers)

    def write_weights(self, data: bytes, path: Path) -> None:
        """See `ModelBackend`; the file has all names of shared tensors, as the model itself would write it."""
        self.model.load_state_dict(load_weights(data), strict=False)
        save_model(self.model, str(path))

    def prepare(self, num_steps: int) -> None:
        """See `ModelBackend`."""
        self._state = TorchState(self.model, self.layout)
        self._optimizer = optimizer_of(self._task, self.model.parameters())
        optimized = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        named = dict(self.model.named_parameters())
        self._not_optimized = [
            place
            for place, entry in enumerate(self.layout.entries)
            if entry.kind == "parameter" and id(named[entry.name]) not in optimized
        ]
        self._schedule = _schedule_of(self._task, self.model, num_steps)

    def set_training(self, is_training: bool) -> None:
        """See `ModelBackend`."""
        self.model.train(is_training)

    def load(self, weights: Flat) -> None:
        """See `ModelBackend`."""
        self._state.load(weights)

    def save(self, into: Flat) -> None:
        """See `ModelBackend`."""
        self._state.save(into)

    def save_gradients(self, into: Flat) -> None:
        """See `ModelBackend`."""
        self._state.save_gradients(into)

    @property
    def unused(self) -> tuple[int, ...]:
        """See `ModelBackend`; parameters without an optimizer are unused, too."""
        return tuple(dict.fromkeys((*self._state.unused, *self._not_optimized)))

    def backward(self, indices: NDArray[np.int64], epoch: int, seeds: tuple[int, ...]) -> Tensor:
        """See `ModelBackend`."""
        inputs, targets = self._batch(self.train_data, indices, epoch)
        seed_all(*seeds, device=self._device)
        self._state.zero_gradients()
        with self._precision.autocast():
            loss = require_scalar(self._task.loss(call(self.model, inputs), targets))
        loss.backward()  # type: ignore[no-untyped-call]
        return accelerators.wide(loss.detach())

    def read_later(self, loss: Tensor) -> Callable[[], float]:
        """See `ModelBackend`."""
        return accelerators.HostCopy(loss).read

    def step(self, number: int) -> None:
        """See `ModelBackend`; the last settings of the schedule apply to all later steps."""
        settings = self._schedule[min(number, len(self._schedule) - 1)]
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        with self._state.without_unused():
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self._optimizer.step()

    @torch.no_grad()
    def evaluate(self, first: int, stop: int) -> tuple[float, float]:
        """See `ModelBackend`."""
        inputs, targets = self._batch(self._validation, np.arange(first, stop, dtype=np.int64), 0)
        with self._precision.autocast():
            outputs = call(self.model, inputs)
            loss = self._task.loss(outputs, targets)
        correct = count_correct(self._task, outputs, targets).to(self._device, accelerators.widest(self._device))
        sums = torch.stack((accelerators.wide(loss) * (stop - first), correct))
        loss_sum, num_correct = sums.tolist()
        return loss_sum, num_correct

    def close(self) -> None:
        """See `ModelBackend`."""
        self._optimizer.state.clear()
        accelerators.release_memory(self._device)

    @cached_property
    def _validation(self) -> Any:
        if self._task.validation_data is None:
            return None
        data = self._task.validation_data()
        require(count_samples(data) > 0, "validation samples", 0, "at least one")
        return data

    def _batch(self, dataset: Any, indices: NDArray[np.int64], epoch: int) -> tuple[Any, Any]:
        inputs, targets = split_batch(self._load(dataset, indices, self._seed, epoch))
        prepare = self._precision.prepare
        return prepare(to_device(inputs, self._device)), prepare(to_device(targets, self._device))


def _refuse_sparse(task: Task, model: nn.Module) -> None:
    """Raise UnknownOptimizer for an optimizer of sparse gradients, since nodes exchange dense ones."""
    has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
    if has_sparse and task.optimizer and isinstance(task.optimizer(model.parameters()), SparseAdam):
        raise UnknownOptimizer("SparseAdam, which takes sparse gradients alone")


def optimizer_of(task: Task, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the task's optimizer, or the default one."""
    return task.optimizer(parameters) if task.optimizer else SGD(parameters, lr=0.1, momentum=0.9)


def _kind_of(optimizer: Optimizer) -> str:
    """Return the kind of the optimizer for the server."""
    kind = type(optimizer)
    name = _KINDS.get(kind, kind.__name__)
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return f"{name} with hooks of its step" if has_hooks else name


def _schedule_of(task: Task, model: nn.Module, num_steps: int) -> list[list[Settings]]:
    """Return the settings of every group in every step of a run of `num_steps`; one step's if they never change.

    Raises:
        InvalidInput: the schedule depends on something that is not known before the run.
    """
    optimizer = optimizer_of(task, model.parameters())
    if task.scheduler is None:
        return [_settings(optimizer)]
    scheduler, steps = task.scheduler(optimizer, num_steps), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the optimizer makes no steps
        for _ in range(num_steps):
            steps.append(_settings(optimizer))
            try:
                scheduler.step()
            except TypeError as error:
                rule = "a schedule has to be known before the run with --agreement"
                name = type(scheduler).__name__
                raise TaskCannot(f"{rule}: {name} is not; make it a BatchTask, and leave --agreement out") from error
    return steps


def _settings(optimizer: Optimizer) -> list[Settings]:
    return [{name: _number(group[name]) for name in _SCHEDULED if name in group} for group in optimizer.param_groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
