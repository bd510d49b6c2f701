"""Whether a task and its thin twin are the same task: both then serve one run, side by side.

the same arrays in the same order? -> the same samples? -> from the same weights, a few steps: the same losses,
gradients, rates and weights afterwards?
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evener import autodiff as ad
from evener.data.loader import collect, split_batch
from evener.errors import InvalidInput
from evener.ps.thin_backend import layout_of_thin_model
from evener.ps.torch_backend import apply_settings, optimizer_of, schedule_of
from evener.ps.torch_state import layout_of_model, shared_state
from evener.task import Task, ThinTask

_SAMPLES, _STEPS = 16, 3
_EQUAL_SAMPLES, _EQUAL = 1e-6, 1e-8
"""Relative differences that rounding explains: samples are made in float32, steps are done in float64."""

Arrays = dict[str, NDArray[Any]]


class _Step(NamedTuple):
    loss: float
    gradients: Arrays
    after: Arrays


def check_parity(task: Task, thin: ThinTask) -> None:
    """Compare what both compute, in float64, from the weights that the task's model is made with.

    What is drawn at random, as by dropout, cannot agree: check with a rate of 0. A gradient that is clipped cannot
    either, for a thin task has no clipping.

    Raises:
        InvalidInput: they differ; names the array, the samples or the step.
    """
    model, twin = task.model().double(), thin.model().double()
    _check_layouts(layout_of_model(model).entries, layout_of_thin_model(twin).entries)
    arrays = thin.train_data()
    _check_samples("training", task.train_data(), arrays)
    if (task.validation_data is None) != (thin.validation_data is None):
        raise InvalidInput("one of the twins has validation data, the other none")
    if task.validation_data is not None and thin.validation_data is not None:
        _check_samples("validation", task.validation_data(), thin.validation_data())
    _check_settings(task, thin)
    twin.load_state_dict({name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}, strict=False)
    inputs, targets = (_prepared(array[:_SAMPLES]) for array in arrays)
    num_steps = task.epochs * -(-len(arrays[0]) // task.batch_size)
    ours = _thin_steps(thin, twin, inputs, targets, num_steps)
    for number, (one, other) in enumerate(zip(_steps(task, model, inputs, targets, num_steps), ours, strict=True)):
        _check_step(number, one, other)


def _check_layouts(entries: tuple[Any, ...], thin_entries: tuple[Any, ...]) -> None:
    for entry, thin_entry in zip(entries, thin_entries, strict=False):
        if entry != thin_entry:
            raise InvalidInput(f"where the task's model has {_words(entry)}, its thin twin has {_words(thin_entry)}")
    if len(entries) != len(thin_entries):
        raise InvalidInput(f"the task's model has {len(entries)} arrays, its thin twin has {len(thin_entries)}")


def _words(entry: Any) -> str:
    return f"the {entry.kind} {entry.name} of shape {entry.shape}"


def _check_samples(what: str, dataset: Any, arrays: tuple[NDArray[Any], NDArray[Any]]) -> None:
    counts = [len(dataset), *map(len, arrays)]
    if len(set(counts)) != 1:
        raise InvalidInput(
            f"the task has {counts[0]} {what} samples, its thin twin {counts[1]} inputs and {counts[2]} targets"
        )
    chosen = np.unique(np.linspace(0, counts[0] - 1, _SAMPLES).astype(np.int64))
    for name, tensor, array in zip(
        ("inputs", "targets"), split_batch(collect(dataset, chosen, 0, 0)), arrays, strict=True
    ):
        if tensor.shape != array[chosen].shape or not _are_equal(tensor.numpy(), array[chosen], _EQUAL_SAMPLES):
            raise InvalidInput(f"the {name} of the {what} samples differ between the task and its thin twin")


def _check_settings(task: Task, thin: ThinTask) -> None:
    for field in ("name", "batch_size", "epochs"):
        if getattr(task, field) != getattr(thin, field):
            raise InvalidInput(
                f"{field} is {getattr(task, field)!r} in the task, {getattr(thin, field)!r} in its thin twin"
            )


def _prepared(array: NDArray[Any]) -> NDArray[Any]:
    """Numbers as float64, bytes (pixels) too; labels and indices as they are."""
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == np.uint8 else array


def _steps(
    task: Task, model: torch.nn.Module, inputs: NDArray[Any], targets: NDArray[Any], num_steps: int
) -> Iterator[_Step]:
    schedule, optimizer = schedule_of(task, model, num_steps), optimizer_of(task, model.parameters())
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    for number in range(_STEPS):
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: _array(tensor.grad) for name, tensor in model.named_parameters() if tensor.requires_grad}
        apply_settings(optimizer, schedule[min(number, len(schedule) - 1)])
        optimizer.step()
        yield _Step(
            float(loss.detach()), gradients, {name: _array(tensor) for name, tensor in shared_state(model).items()}
        )


def _thin_steps(
    thin: ThinTask, model: ad.nn.Module, inputs: NDArray[Any], targets: NDArray[Any], num_steps: int
) -> Iterator[_Step]:
    optimizer = thin.optimizer(model.parameters())
    peaks = [group["lr"] for group in optimizer.param_groups]
    for number in range(_STEPS):
        optimizer.zero_grad()
        loss = thin.loss(model(ad.from_numpy(inputs)), ad.from_numpy(targets))
        loss.backward()
        gradients = {name: _array(tensor.grad) for name, tensor in model.named_parameters()}
        if thin.rate is not None:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = thin.rate(number, num_steps) * peak
        optimizer.step()
        yield _Step(
            float(loss.item()), gradients, {name: _array(tensor) for name, tensor in model.state_dict().items()}
        )


def _array(tensor: Any) -> NDArray[Any]:
    assert tensor is not None, "every trained parameter has a gradient after backward"
    return np.array(tensor.detach().numpy())


def _check_step(number: int, one: _Step, other: _Step) -> None:
    if not _are_equal(np.array(one.loss), np.array(other.loss), _EQUAL):
        raise InvalidInput(f"in step {number + 1} the loss is {one.loss!r}, that of the thin twin {other.loss!r}")
    for what, arrays, thin_arrays in (
        ("gradient", one.gradients, other.gradients),
        ("value after the optimiser's step", one.after, other.after),
    ):
        for name, array in arrays.items():
            if not _are_equal(array, thin_arrays[name], _EQUAL):
                raise InvalidInput(f"in step {number + 1} the {what} of {name} differs between task and thin twin")


def _are_equal(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> bool:
    largest = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest))
