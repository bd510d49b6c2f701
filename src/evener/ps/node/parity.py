"""Check whether a task and its thin twin are equivalent, so that both can serve one run.

the same settings? -> the same arrays in the same order? -> the same samples? -> from the same weights, a few steps of
both backends: the same losses, gradients and weights afterwards?
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from evener import autodiff as ad
from evener.agreements.layout import Flat
from evener.data.loader import collect, split_batch
from evener.ps.node.engine import ModelBackend
from evener.ps.node.thin_backend import ThinBackend
from evener.ps.node.torch_backend import TorchBackend
from evener.records.errors import InvalidInput
from evener.records.task import Task, ThinTask

_SAMPLES, _STEPS = 16, 3
_EQUAL_SAMPLES, _EQUAL = 1e-6, 1e-8
"""Relative tolerances for rounding: samples are made in float32, steps are computed in float64."""

Arrays = tuple[NDArray[Any], NDArray[Any]]


class _Float64:
    """The precision of both backends."""

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model.double()

    def prepare(self, value: Any) -> Any:
        return value


def check_parity(task: Task, thin: ThinTask) -> None:
    """Compare both in float64, from the initial weights of the task's model.

    Dropout is compared with a rate of 0. Functions that draw random numbers cannot agree. The bound on the norm of the
    gradient is not compared, since the master applies it.

    Raises:
        InvalidInput: they differ; names the setting, the array, the samples or the step.
    """
    for field in ("name", "batch_size", "epochs"):
        ours, theirs = getattr(task, field), getattr(thin, field)
        _refuse_if(ours != theirs, f"{field} is {ours!r} in the task, {theirs!r} in its thin twin")
    arrays = thin.train_data()
    _check_samples("training", task.train_data(), arrays)
    has_validation = task.validation_data is not None, thin.validation_data is not None
    _refuse_if(len(set(has_validation)) == 2, "one of the twins has validation data, the other none")
    if task.validation_data is not None and thin.validation_data is not None:
        _check_samples("validation", task.validation_data(), thin.validation_data())
    few = _widened(arrays[0][:_SAMPLES]), _widened(arrays[1][:_SAMPLES])
    ours_of = replace(
        task,
        model=lambda: _without_dropout(task.model()),
        train_data=lambda: TensorDataset(*map(torch.from_numpy, few)),
        clip_norm=None,
    )
    theirs_of = replace(thin, model=lambda: _without_dropout(thin.model()), train_data=lambda: few)
    one, other = TorchBackend(ours_of, 0, _Float64()), ThinBackend(theirs_of, 0, "fp64")
    _check_layouts(one.layout.entries, other.layout.entries)
    _check_steps(one, other, len(few[0]), task.epochs * -(-len(arrays[0]) // task.batch_size))


def _without_dropout(model: Any) -> Any:
    """Disable the dropout layers of `model`, of either framework."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | ad.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _check_samples(what: str, dataset: Any, arrays: Arrays) -> None:
    counts = [len(dataset), *map(len, arrays)]
    _refuse_if(
        len(set(counts)) != 1,
        f"the task has {counts[0]} {what} samples, its thin twin {counts[1]} inputs and {counts[2]} targets",
    )
    chosen = np.unique(np.linspace(0, counts[0] - 1, _SAMPLES).astype(np.int64))
    tensors = split_batch(collect(dataset, chosen, 0, 0))
    for name, tensor, array in zip(("inputs", "targets"), tensors, arrays, strict=True):
        same = tensor.shape == array[chosen].shape and _are_equal(tensor.numpy(), array[chosen], _EQUAL_SAMPLES)
        _refuse_if(not same, f"the {name} of the {what} samples differ between the task and its thin twin")


def _check_layouts(entries: tuple[Any, ...], thin_entries: tuple[Any, ...]) -> None:
    for entry, thin_entry in zip(entries, thin_entries, strict=False):
        ours, theirs = (f"the {one.kind} {one.name} of shape {one.shape}" for one in (entry, thin_entry))
        _refuse_if(entry != thin_entry, f"where the task's model has {ours}, its thin twin has {theirs}")
    counts = len(entries), len(thin_entries)
    _refuse_if(counts[0] != counts[1], f"the task's model has {counts[0]} arrays, its thin twin has {counts[1]}")


def _check_steps(one: ModelBackend, other: ModelBackend, num_samples: int, num_steps: int) -> None:
    weights, indices = one.initial_weights(), np.arange(num_samples, dtype=np.int64)
    for backend in (one, other):
        backend.prepare(num_steps)
        backend.set_training(True)
        backend.load(weights)
    for number in range(_STEPS):
        losses = [float(backend.backward(indices, 0, (0, number))) for backend in (one, other)]
        _refuse_if(
            not _are_equal(np.array(losses[0]), np.array(losses[1]), _EQUAL),
            f"in step {number + 1} the loss is {losses[0]!r}, that of the thin twin {losses[1]!r}",
        )
        gradients = [Flat(one.layout), Flat(one.layout)]
        states = [Flat(one.layout), Flat(one.layout)]
        for backend, gradient, state in zip((one, other), gradients, states, strict=True):
            backend.save_gradients(gradient)
            backend.step(number)
            backend.save(state)
        _check_arrays(number, "gradient", gradients)
        _check_arrays(number, "value after the optimiser's step", states)


def _check_arrays(number: int, what: str, flats: list[Flat]) -> None:
    ours, theirs = (flat.views() for flat in flats)
    for name, array in ours.items():
        _refuse_if(
            not _are_equal(array, theirs[name], _EQUAL),
            f"in step {number + 1} the {what} of {name} differs between task and thin twin",
        )


def _widened(array: NDArray[Any]) -> NDArray[Any]:
    """Convert numbers and bytes (pixels) to float64; return labels and indices as they are."""
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == np.uint8 else array


def _are_equal(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    largest = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest))


def _refuse_if(condition: bool, why: str) -> None:
    if condition:
        raise InvalidInput(why)
