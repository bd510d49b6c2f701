"""Runs training steps on a copy of a task's model, and finds the largest batch that fits a device's memory.

    need(n)  = bytes of a complete step on n samples
    capacity = the largest n with need(n) <= 90 % of the usable memory

On a GPU need(n) is PyTorch's peak, and the result is always a batch whose peak was measured. Libraries need more memory
for some sizes than for others, and weights may dominate the step of a small batch. On a CPU need(n) is counted at two
small n and extrapolated linearly. It sums weights, buffers, gradients, optimizer state, what the graph keeps for the
backward pass (each storage once), and four times the largest of these for gradients in flight and for the layouts that
kernels reorder them into. Counting live bytes shows what re-materialisation saves.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from evener.parallel.gradient_hooks import copied
from evener.records.errors import DoesNotFit, require
from evener.system import accelerators
from evener.system.memory import is_out_of_memory
from evener.tracer.nested import tensors_in

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
LossStep = Callable[[nn.Module, Any], Tensor]
Fetch = Callable[[int], Any]
SHARE_OF_USABLE = 0.9
_SMALL_BATCHES = (2, 4)
_IN_FLIGHT = 4
_GROWTH = 8
_MAX_STEPS = 24
_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A model and optimizer for trial steps.

    Attributes:
        model: a copy, in training mode.
        optimizer: optimizer of the copy's parameters.
        loss_step: (model, batch) -> scalar loss.
        fetch: number of samples -> a batch of that size, on the device.
        device: device that computes.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_step: LossStep
    fetch: Fetch
    device: torch.device

    def run_step(self, samples: int) -> None:
        """Run one complete step on a new batch of `samples`; gradients are kept."""
        self.clear_gradients()
        self.loss_step(self.model, self.fetch(samples)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self.model.zero_grad(set_to_none=True)


@contextmanager
def dry_run_of(
    model: nn.Module, make_optimizer: MakeOptimizer, loss_step: LossStep, fetch: Fetch, device: torch.device
) -> Iterator[DryRun]:
    """Yield a dry run with a copy of `model`; afterwards the model and all random number generators are unchanged."""
    with random_numbers_kept(device):
        twin = copied(model).train()
        twin.zero_grad(set_to_none=True)
        optimizer = make_optimizer(twin.parameters())
        yield DryRun(model=twin, optimizer=optimizer, loss_step=loss_step, fetch=fetch, device=device)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and PyTorch (CPU and `device`) at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with accelerators.random_numbers_kept(device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def capacity(trial: DryRun, largest: int, usable_bytes: int) -> int | None:
    """Return the largest number of samples below `largest` for which one training step fits `usable_bytes`.

    On a device that counts its memory this runs a step with the returned number, and with some smaller ones.

    Args:
        trial: the dry run, whose weights need memory in addition to those of the original model.
        largest: largest batch of interest.
        usable_bytes: usable bytes of the device's memory.

    Returns:
        1 to `largest` - 1; None if `largest` samples fit, so that memory is no limit.

    Raises:
        DoesNotFit: not even one sample fits.
        InvalidValue: `largest` is not positive.
    """
    require(largest > 0, "largest", largest, "positive")
    if accelerators.capabilities(trial.device).counts_memory:
        samples = largest_measured(partial(_measured_peak, trial), largest, SHARE_OF_USABLE * usable_bytes)
        if samples < 1:
            raise DoesNotFit(f"not even one sample fits {trial.device}; allow more memory, or train a smaller model")
    else:
        few, more = (min(samples, largest) for samples in _SMALL_BATCHES)
        fixed, need_few, need_more = _cpu_needs(trial, few, more)
        fitting = samples_that_fit(usable_bytes, fixed, (few, need_few), (more, need_more))
        if fitting < 1:
            raise DoesNotFit(
                f"not even one sample fits: a step on {few} needs {need_few} of {usable_bytes} usable bytes; "
                "allow more memory, or train a smaller model"
            )
        samples = int(min(fitting, largest))
    return None if samples == largest else samples


def largest_measured(peak: Callable[[int], float], largest: int, room: float) -> int:
    """Return the largest batch whose measured peak is within `room`, to about 2 %; 0 if one sample needs more.

    The batch grows along the line through the two largest peaks, at most eightfold at a time, so that no step needs
    much more than `room`. Between a batch that fits and one that does not, the line through both gives the next size.

    Args:
        peak: (samples) -> bytes of a step, or infinity if it runs out of memory. Its first answer may be too large.
        largest: largest batch of interest.
        room: bytes that a step may use.
    """
    samples = min(_SMALL_BATCHES[0], largest)
    peak(samples)  # makes the optimizer's state and the libraries' workspaces
    below, fits, excess = (0, 0.0), (0, 0.0), (largest + 1, 0.0)  # 0 bytes: not tried yet
    for _ in range(_MAX_STEPS):
        need = peak(samples)
        if need <= room:
            below, fits = fits, (samples, need)
        else:
            excess = (samples, need)
        samples = _next_batch(below, fits, excess, room)
        is_close = fits[1] >= (1 - _TOLERANCE) * room or excess[0] - fits[0] <= max(1, _TOLERANCE * fits[0])
        if samples <= fits[0] or is_close:
            break
    return fits[0]


def _next_batch(below: tuple[int, float], fits: tuple[int, float], excess: tuple[int, float], room: float) -> int:
    """Return the next batch, given (samples, bytes) of the two largest that fit and of the smallest that does not."""
    low, high = fits[0], excess[0] - 1
    if low == 0:
        return high // 2 if high > 1 else high
    if excess[1] == math.inf:  # it ran out of memory, so its need is unknown
        return (low + high + 1) // 2
    if excess[1] > 0:
        slope = (excess[1] - fits[1]) / (excess[0] - low)
    elif below[0] == 0:
        return min(high, 2 * low)
    else:
        slope = (fits[1] - below[1]) / (low - below[0])
    wanted = low + (room - fits[1]) / slope if slope > 0 else math.inf
    return int(min(high, _GROWTH * low, max(wanted, low + 1)))


def samples_that_fit(usable_bytes: int, fixed_bytes: int, few: tuple[int, int], more: tuple[int, int]) -> float:
    """Return the largest n whose need, a line through two measured (n, bytes), is within 90 % of `usable_bytes`.

    Args:
        usable_bytes: usable bytes of the device.
        fixed_bytes: bytes that any batch needs; the line starts there if `few` and `more` are the same batch.
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


def saved_bytes(trial: DryRun, samples: int) -> tuple[int, int]:
    """Return the bytes that the forward pass of `samples` keeps for backward: (in total, of the largest storage).

    Every storage counts once; parameters and buffers do not count.
    """
    batch, storages = trial.fetch(samples), dict[int, int]()
    state_pointers = {t.untyped_storage().data_ptr() for t in _state(trial.model)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trial.loss_step(trial.model, batch)
    sizes = [nbytes for pointer, nbytes in storages.items() if pointer not in state_pointers]
    del loss
    return sum(sizes), max(sizes, default=0)


def _cpu_needs(trial: DryRun, few: int, more: int) -> tuple[int, int, int]:
    trial.run_step(few)
    gradients = (p.grad for p in trial.model.parameters() if p.grad is not None)
    fixed = _total(_state(trial.model)) + _total(gradients) + _total(_optimizer_state(trial))
    saved = [saved_bytes(trial, samples) for samples in (few, more)]
    return (fixed, *(fixed + total + _IN_FLIGHT * largest for total, largest in saved))  # type: ignore[return-value]


def _measured_peak(trial: DryRun, samples: int) -> float:
    """Return PyTorch's peak in a step of `samples`, less other allocations; infinity if memory runs out."""
    trial.clear_gradients()
    others = accelerators.allocated_bytes(trial.device) - _total(_state(trial.model)) - _total(_optimizer_state(trial))
    accelerators.reset_peak(trial.device)
    if not _runs(trial, samples):
        trial.clear_gradients()
        accelerators.release_memory(trial.device)
        return math.inf
    return accelerators.peak_bytes(trial.device) - others


def _runs(trial: DryRun, samples: int) -> bool:
    """Return whether a step of `samples` fits; as a function, so that the error's references are freed on return."""
    try:
        trial.run_step(samples)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _optimizer_state(trial: DryRun) -> list[Tensor]:
    return [v for state in trial.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _total(tensors: Iterable[Any]) -> int:
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a sparse one, those of its values and indices."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts what operations of this thread (backward passes on CPUs included) allocate.

    Attributes:
        now: bytes of live tensors that were created since it was entered.
        peak: the maximum of `now`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; its results count if they do not share the memory of an argument."""
        arguments = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in arguments and storage not in self._known:
                self._known.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return outputs

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
