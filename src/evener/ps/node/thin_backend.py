"""The backend of thin tasks, which computes with NumPy alone, by `evener.autodiff`.

Its state has the layout of the task's twin in PyTorch. The backward pass writes gradients into one flat array, which is
copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener import autodiff as ad
from evener.agreements.layout import Flat, StateLayout, layout_of
from evener.agreements.settings import Outer
from evener.ps.protocol.server_optimizer import group_numbers, server_optimizer
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput, require
from evener.records.task import ThinTask

_STATE, _OPTIMIZER_PREFIX = "state", "optimizer."
_DTYPES = {"fp32": np.float32, "fp64": np.float64}
_KINDS = {ad.optim.SGD: "SGD", ad.optim.Adam: "Adam", ad.optim.AdamW: "AdamW"}


class ThinBackend:
    """A thin task's model and data; see `ModelBackend`.

    Args:
        task: thin task.
        seed: seed of the initial weights.
        precision: fp32 or fp64.

    Attributes:
        model: model with the initial weights of `seed`.

    Raises:
        InvalidInput: NumPy has no such precision, or the data are not inputs and as many targets.
    """

    clip_norm: float | None = None
    synchronise: Callable[[], None] | None = None

    def __init__(self, task: ThinTask, seed: int, precision: str) -> None:
        require(precision in _DTYPES, "--precision", precision, "fp32 or fp64 without PyTorch")
        self._task, self._seed, self.name = task, seed, task.name
        self._dtype = np.dtype(_DTYPES[precision])
        self._train = _made("train", task.train_data())
        self.num_samples = len(self._train[0])
        self.has_accuracy = task.has_accuracy
        ad.manual_seed(seed)
        self.model = _checked(task.model())
        if precision == "fp64":
            self.model = self.model.double()
        self.layout = layout_of_thin_model(self.model)
        self.fixed_sum: float | None = None
        self._arena = ad.ParameterArena(
            self.model.named_parameters()
        )  # in the order of the layout, whatever the groups
        self._optimizer = _checked_optimizer(task.optimizer(self.model.parameters()))
        self._peak_rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._buffers = dict(self.model.named_buffers())
        self.normalises = bool(self._buffers)
        self._memory = ad.Arena()
        self._num_steps = 1
        self._views: dict[int, tuple[Flat, Mapping[str, NDArray[Any]]]] = {}

    def twin(self, precision: str) -> ThinBackend:
        """Make another backend of the same task and data, with the first weights, which computes in `precision`."""
        return ThinBackend(replace(self._task, train_data=lambda: self._train), self._seed, precision)

    @property
    def num_validation(self) -> int:
        """See `ModelBackend`."""
        return len(self._validation[0]) if self._validation else 0

    def labels(self) -> NDArray[Any]:
        """See `ModelBackend`."""
        return np.asarray(self._train[1])

    def initial_weights(self) -> Flat:
        """See `ModelBackend`."""
        weights = Flat(self.layout)
        self.save(weights)
        return weights

    def server_optimizer(self, num_steps: int) -> Outer:
        """See `ModelBackend`."""
        groups, kind = self._optimizer.param_groups, type(self._optimizer)
        steps = range(num_steps if self._task.rate else 1)
        schedule = [[{"lr": rate} for rate in self._rates(step, num_steps)] for step in steps]
        numbers = group_numbers(groups, self.model.parameters())
        return server_optimizer(_KINDS.get(kind, kind.__name__), groups, schedule, numbers)

    def write_weights(self, data: bytes, path: Path) -> None:
        """See `ModelBackend`."""
        atomic_write(path, data)

    def prepare(self, num_steps: int) -> None:
        """See `ModelBackend`."""
        self._num_steps = num_steps

    def set_training(self, is_training: bool) -> None:
        """See `ModelBackend`."""
        self.model.train(is_training)

    def load(self, weights: Flat) -> None:
        """See `ModelBackend`."""
        self._arena.load(_only(weights.parameters))
        for name, view in self._views_of(weights).items():
            self._buffers[name].copy_(view)

    def save(self, into: Flat) -> None:
        """See `ModelBackend`."""
        np.copyto(_only(into.parameters), self._arena.values)
        self._save_buffers(into)

    def save_gradients(self, into: Flat) -> None:
        """See `ModelBackend`."""
        np.copyto(_only(into.parameters), self._arena.gradients)
        self._save_buffers(into)

    def batch(self, indices: NDArray[np.int64]) -> tuple[ad.Tensor, ad.Tensor]:
        """Return inputs and targets of these training samples."""
        return self._tensors(self._train, indices)

    def backward(self, indices: NDArray[np.int64], _epoch: int, seeds: tuple[int, ...]) -> float:
        """See `ModelBackend`."""
        ad.manual_seed(seeds)
        with self._memory:
            self._arena.zero_grad()
            inputs, targets = self.batch(indices)
            loss = _scalar(self._task.loss(self.model(inputs), targets))
            if not loss.requires_grad:
                raise InvalidInput(
                    "the thin task's loss depends on no trainable weight: it is detached from the model's outputs"
                )
            loss.backward()
            return float(loss.item())

    @property
    def unused(self) -> tuple[int, ...]:
        """See `ModelBackend`; parameters without an optimizer are unused, too."""
        optimized = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        parameters = enumerate(self.model.parameters())  # which come first in the layout
        return tuple(place for place, one in parameters if one.grad is None or id(one) not in optimized)

    def read_later(self, loss: float) -> Callable[[], float]:
        """See `ModelBackend`."""
        return lambda: loss

    def step(self, number: int) -> None:
        """See `ModelBackend`."""
        for group, rate in zip(self._optimizer.param_groups, self._rates(number, self._num_steps), strict=True):
            group["lr"] = rate
        self._optimizer.step()

    def evaluate(self, first: int, stop: int) -> tuple[float, float]:
        """See `ModelBackend`."""
        assert self._validation is not None
        with self._memory, ad.no_grad():
            inputs, targets = self._tensors(self._validation, slice(first, stop))
            outputs = self.model(inputs)
            loss = float(_scalar(self._task.loss(outputs, targets)).item()) * (stop - first)
            if not self.has_accuracy:
                return loss, 0.0
            return loss, float((outputs.numpy().argmax(1) == self._validation[1][first:stop]).sum())

    def close(self) -> None:
        """See `ModelBackend`."""
        self._views.clear()

    def checkpoint(self) -> dict[str, NDArray[Any]]:
        """Return copies of the state and of the optimizer's state."""
        optimizer_state = {f"{_OPTIMIZER_PREFIX}{name}": array for name, array in self._optimizer.state_dict().items()}
        return {_STATE: self.initial_weights().memory, **optimizer_state}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load a `checkpoint` of the same task.

        Raises:
            InvalidValue, StateMismatch: the checkpoint belongs to another model or optimizer.
        """
        self.load(Flat(self.layout, np.array(arrays[_STATE])))
        optimizer_state = {
            name.removeprefix(_OPTIMIZER_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(_OPTIMIZER_PREFIX)
        }
        self._optimizer.load_state_dict(optimizer_state)

    @cached_property
    def _validation(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        if self._task.validation_data is None:
            return None
        inputs, targets = _made("validation", self._task.validation_data())
        require(len(inputs) > 0, "validation samples", 0, "at least one")
        return inputs, targets

    def _tensors(self, arrays: tuple[NDArray[Any], NDArray[Any]], chosen: Any) -> tuple[ad.Tensor, ad.Tensor]:
        """Return the chosen samples of inputs and targets, in the precision of the model.

        In fp64 inputs that are bytes are converted, too, since arithmetic would make them float32.
        """
        inputs, targets = (self._in_precision(array[chosen]) for array in arrays)
        if inputs.dtype == np.uint8 and self._dtype == np.float64:
            inputs = inputs.astype(self._dtype)
        return ad.from_numpy(inputs), ad.from_numpy(targets)

    def _in_precision(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(self._dtype, copy=False) if array.dtype.kind == "f" else array

    def _rates(self, step: int, num_steps: int) -> list[float]:
        """Return the learning rate of every group of parameters in `step`."""
        share = self._task.rate(step, num_steps) if self._task.rate else 1.0
        return [share * peak for peak in self._peak_rates]

    def _save_buffers(self, into: Flat) -> None:
        for name, view in self._views_of(into).items():
            np.copyto(view, self._buffers[name].numpy())

    def _views_of(self, flat: Flat) -> Mapping[str, NDArray[Any]]:
        """Return views of the buffers in `flat`, from a cache of the few states in use."""
        if not self._buffers:
            return {}
        known = self._views.get(id(flat))
        if known is None or known[0] is not flat:
            views = flat.views()
            known = self._views[id(flat)] = flat, {name: views[name] for name in self._buffers}
        return known[1]


def layout_of_thin_model(model: ad.nn.Module) -> StateLayout:
    """Return the layout of the model's state: parameters, then buffers, in the order of the model."""
    buffers = dict(model.named_buffers())
    named = dict(model.named_parameters()) | buffers
    return layout_of({name: tensor.detach().numpy() for name, tensor in named.items()}, statistics=buffers)


def _made(what: str, data: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the arrays that a task makes. Raises InvalidInput: they are no inputs and targets of as many samples."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2 and all(np.ndim(array) for array in data)
    got = f"{len(data)} values" if isinstance(data, tuple | list) else type(data).__name__
    require(is_pair, f"ThinTask.{what}_data", got, "a function that returns two arrays, inputs and targets")
    inputs, targets = map(np.asarray, data)
    if len(inputs) != len(targets):
        raise InvalidInput(f"the thin task has {len(inputs)} inputs and {len(targets)} targets in its {what} data")
    return inputs, targets


def _checked(model: Any) -> ad.nn.Module:
    """Return the model that a task makes. Raises InvalidInput: it is none, or has nothing to train."""
    require(
        isinstance(model, ad.nn.Module), "ThinTask.model", model, "a function that returns an evener.autodiff.nn.Module"
    )
    if not sum(parameter.detach().numpy().size for parameter in model.parameters()):
        raise InvalidInput("the thin task's model has no parameters: nothing can be trained")
    return model  # type: ignore[no-any-return]


def _scalar(loss: Any) -> ad.Tensor:
    """Return the loss that a task computes. Raises InvalidInput if it is not a tensor of a single number."""
    if isinstance(loss, ad.Tensor) and prod(loss.shape) == 1:
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, ad.Tensor) else f"a {type(loss).__name__}"
    raise InvalidInput(f"the thin task's loss returns {kind}, not a single number: return the mean over the samples")


def _checked_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that a task makes. Raises InvalidInput if it is none of `evener.autodiff.optim`."""
    is_known = isinstance(optimizer, ad.optim.Optimizer)
    require(is_known, "ThinTask.optimizer", optimizer, "a function that returns an optimizer of evener.autodiff.optim")
    return optimizer


def _only(sections: tuple[Any, ...]) -> Any:
    """Return the parameters of a thin model, which are of one type."""
    (parameters,) = sections
    return parameters
