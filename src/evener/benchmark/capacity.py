"""The largest batch of a task that fits a device's memory, known before training.

    need(n)  = bytes of a whole step on n samples, measured at two small n, taken as a straight line
    capacity = the largest n with need(n) <= 90 % of the usable memory

On a GPU need(n) is PyTorch's peak. On a CPU it is counted: weights, buffers, gradients, optimiser state, what the graph
keeps for the backward pass (each storage once), and four times the largest of these for gradients in flight and for the
layouts that kernels reorder them into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from evener.benchmark.trial import Fetch, LossStep, MakeOptimizer, Trial, trial_of
from evener.errors import DoesNotFit, require
from evener.memory import usable_memory

SHARE_OF_USABLE = 0.9
_SMALL_BATCHES = (2, 4)
_STEP_DOWN = 0.9
_IN_FLIGHT = 4


def largest_batch(
    *,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    loss_step: LossStep,
    fetch: Fetch,
    device: torch.device,
    largest: int,
    memory_limit: int | None = None,
) -> int | None:
    """The largest number of samples, below `largest`, that one training step can hold on `device`.

    On a GPU the answer is confirmed by one step of that size, and lowered by tenths until it runs. Model, gradients and
    random numbers stay as they were.

    Args:
        model: on the device; its weights count once more for the copy that is tried.
        make_optimizer: parameters -> optimiser.
        loss_step: (model, batch) -> scalar loss; runs the forward pass.
        fetch: number of samples -> a batch of so many, on the device.
        device: that computes.
        largest: batch that will ever be asked for.
        memory_limit: bytes that the user grants; None for all that are usable.

    Returns:
        From 1 to `largest` - 1; None if `largest` samples fit, so that memory bounds nothing.

    Raises:
        DoesNotFit: not even one sample fits.
        InvalidValue: `largest` or `memory_limit` is not positive.
    """
    require(largest > 0, "largest", largest, "positive")
    usable = usable_memory(str(device), memory_limit)[1]
    with trial_of(model, make_optimizer, loss_step, fetch, device) as trial:
        return capacity(trial, largest, usable)


def capacity(trial: Trial, largest: int, usable_bytes: int) -> int | None:
    """`largest_batch` of a trial that is already set up, in `usable_bytes`. Raises DoesNotFit."""
    few, more = (min(samples, largest) for samples in _SMALL_BATCHES)
    needs = _gpu_needs if trial.device.type == "cuda" else _cpu_needs
    fixed, need_few, need_more = needs(trial, few, more)
    fitting = samples_that_fit(usable_bytes, fixed, (few, need_few), (more, need_more))
    if fitting < 1:
        raise DoesNotFit(
            f"not even one sample fits: a step on {few} needs {need_few} bytes, of {usable_bytes} that are usable; "
            "allow more memory, or train a smaller model"
        )
    samples = int(min(fitting, largest))
    if trial.device.type == "cuda":
        samples = _confirmed(trial, samples)
    return None if samples == largest else samples


def samples_that_fit(usable_bytes: int, fixed_bytes: int, few: tuple[int, int], more: tuple[int, int]) -> float:
    """The largest n whose need, a straight line through two measured (n, bytes), is within 90 % of `usable_bytes`.

    Args:
        usable_bytes: of the device.
        fixed_bytes: that any batch needs; stands in for the line's start where `few` and `more` are the same batch.
        few: a small batch and its bytes.
        more: a larger one, or the same.

    Returns:
        A whole number, 0 if nothing fits; infinity where the need does not grow with n and fits.
    """
    room = SHARE_OF_USABLE * usable_bytes
    first = few if few[0] < more[0] else (0, fixed_bytes)
    slope = (more[1] - first[1]) / (more[0] - first[0])
    if slope <= 0:
        return math.inf if more[1] <= room else 0
    return max(0, math.floor((room - first[1]) / slope + first[0]))


def saved_bytes(trial: Trial, samples: int) -> tuple[int, int]:
    """Bytes that the forward pass of `samples` keeps for the backward pass: (in all, of the largest piece).

    Every storage counts once; parameters and buffers, which live anyway, do not count.
    """
    batch, kept = trial.fetch(samples), dict[int, int]()
    own = {t.untyped_storage().data_ptr() for t in _state(trial.model)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trial.loss_step(trial.model, batch)
    sizes = [nbytes for pointer, nbytes in kept.items() if pointer not in own]
    del loss
    return sum(sizes), max(sizes, default=0)


def _cpu_needs(trial: Trial, few: int, more: int) -> tuple[int, int, int]:
    trial.run_step(few)
    gradients = (p.grad for p in trial.model.parameters() if p.grad is not None)
    optimizer = (v for state in trial.optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    fixed = _total(_state(trial.model)) + _total(gradients) + _total(optimizer)
    kept = [saved_bytes(trial, samples) for samples in (few, more)]
    return (fixed, *(fixed + everything + _IN_FLIGHT * largest for everything, largest in kept))  # type: ignore[return-value]


def _gpu_needs(trial: Trial, few: int, more: int) -> tuple[int, int, int]:
    weights = _total(_state(trial.model))
    before = torch.cuda.memory_allocated(trial.device) - weights
    peaks = []
    for samples in (few, few, more):
        torch.cuda.reset_peak_memory_stats(trial.device)
        try:
            trial.run_step(samples)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(f"not even {samples} samples fit {trial.device}: {error}") from error
        peaks.append(torch.cuda.max_memory_allocated(trial.device) - before)
    fixed = torch.cuda.memory_allocated(trial.device) - before
    return fixed, peaks[1], peaks[2]


def _confirmed(trial: Trial, samples: int) -> int:
    """`samples`, or as many fewer as it takes for one step to run."""
    while samples >= 1 and not _runs(trial, samples):
        trial.clear_gradients()
        torch.cuda.empty_cache()
        samples = int(samples * _STEP_DOWN)
    if samples < 1:
        raise DoesNotFit(f"not even one sample fits {trial.device}; train a smaller model")
    return samples


def _runs(trial: Trial, samples: int) -> bool:
    """Whether a step of `samples` fits. A function of its own: what the error holds on to is free when it returns."""
    try:
        trial.run_step(samples)
    except torch.OutOfMemoryError:
        return False
    return True


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _total(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
