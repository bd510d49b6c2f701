"""Batches that the program has received, identified by their tensors, so that later computations find their batch.

HandedBatches   finds the batch of a tensor while any tensor of that batch exists
Provenance      follows tensors from a batch to the model that the program calls with them
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from evener.frontends.programs.batch_parts import BatchPart
from evener.frontends.programs.function_modes import ModelCalls, begin_mode, end_mode
from evener.tracer.nested import tensors_in

_MAX_PER_STORAGE = 64
"""Tensors in one piece of memory, such as rows of all data, of which the last ones are known."""


@dataclass(frozen=True, kw_only=True)
class HandedBatch:
    """A batch, or a rank's part of it, as the program received it.

    Attributes:
        number: in the order of loading, from 1.
        owner: loader of the batch.
        part: of the batch.
        weight: weight of its loss in the step.
        is_training: whether the program trains on it.
    """

    number: int
    owner: object
    part: BatchPart
    weight: float
    is_training: bool


class _Memory:
    """One storage: the ranges of bytes that tensors of batches occupy, and their batches."""

    def __init__(self, tensor: Tensor) -> None:
        make: Any = StorageWeakRef
        self._storage = make(tensor.untyped_storage())  # the address is not used again while this is there
        self._tensors: list[tuple[int, int, int, HandedBatch]] = []

    @property
    def is_there(self) -> bool:
        """Whether anything still refers to the storage."""
        return not self._storage.expired()

    @property
    def batches(self) -> list[HandedBatch]:
        """Batches with tensors in this storage."""
        return [batch for *_, batch in self._tensors]

    def add(self, tensor: Tensor, batch: HandedBatch) -> None:
        """Record that `tensor`, in this storage, belongs to `batch`."""
        begin, end = _extent(tensor)
        self._tensors = [one for one in self._tensors if one[1:3] != (begin, end)][-_MAX_PER_STORAGE:]
        insort(self._tensors, (batch.number, begin, end, batch), key=lambda one: one[0])

    def of(self, tensor: Tensor) -> HandedBatch | None:
        """Return the last batch that contains `tensor`; None without one."""
        place = _extent(tensor)[0]
        return next((batch for _, begin, end, batch in reversed(self._tensors) if begin <= place < end), None)


class HandedBatches:
    """The batches of a program."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._last: dict[object, HandedBatch] = {}
        self._number = 0

    def give(self, batch: Any, owner: object, part: BatchPart, weight: float, is_training: bool) -> HandedBatch:
        """Record that `owner` hands `batch` to the program; return its description."""
        self._number += 1
        handed = HandedBatch(number=self._number, owner=owner, part=part, weight=weight, is_training=is_training)
        self._last[owner] = handed
        self.know(tensors_in(batch), handed)
        return handed

    def know(self, tensors: Iterable[Tensor], batch: HandedBatch) -> None:
        """Record that `tensors` were computed from `batch`."""
        for tensor in tensors:
            key = _key(tensor)
            if key is not None:
                self._memories.setdefault(key, _Memory(tensor)).add(tensor, batch)

    def of(self, tensors: Iterable[Tensor]) -> HandedBatch | None:
        """Return the last batch that any of `tensors` belongs to; None if it is unknown."""
        memories = ((self._memories.get(_key(tensor) or 0), tensor) for tensor in tensors)
        batches = [batch for memory, tensor in memories if memory and (batch := memory.of(tensor)) is not None]
        return max(batches, key=lambda batch: batch.number, default=None)

    def is_last(self, batch: HandedBatch) -> bool:
        """Whether `batch` is the last one of its owner."""
        return self._last.get(batch.owner) is batch

    def leave(self, owner: object) -> None:
        """Forget the last batch of `owner`, which the program no longer computes."""
        self._last.pop(owner, None)

    def are_kept(self) -> bool:
        """Whether the program still holds a training batch other than the last one of a loader."""
        self._memories = {key: memory for key, memory in self._memories.items() if memory.is_there}
        stored = (memory.batches for memory in self._memories.values())
        held = [batches[0] for batches in stored if len(batches) == 1]  # several batches share the memory of all data
        return any(batch.is_training and not self.is_last(batch) for batch in held)


class Provenance(TorchFunctionMode):
    """Follows tensors from a batch to the calls of models.

    Args:
        batches: of the program.
        called: called with the batch of a model's inputs (None if it is unknown), whether the model trains, and the
            first sizes of its inputs.
        met: called with a batch that is combined with trained tensors, such as labels with outputs in a loss.
    """

    def __init__(
        self,
        batches: HandedBatches,
        called: Callable[[HandedBatch | None, bool, set[int]], None],
        met: Callable[[HandedBatch], None],
    ) -> None:
        super().__init__()
        self._batches, self._called, self._met = batches, called, met
        self._calls = ModelCalls(self._enter, lambda: None)

    def follow(self, model: nn.Module) -> None:
        """Follow calls of `model` and of its modules."""
        self._calls.follow(model)

    def begin(self) -> None:
        """Activate the mode in this thread."""
        begin_mode(self)

    def end(self) -> None:
        """Deactivate the mode."""
        self._calls.end()
        end_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` and assign its outputs to the batch of its inputs."""
        made = func(*args, **(kwargs or {}))
        if not self._calls.is_inside:
            inputs = list(tensors_in((args, kwargs)))
            batch = self._batches.of(inputs)
            if batch is not None:
                self._batches.know(tensors_in(made), batch)
            if batch is not None and any(tensor.requires_grad for tensor in inputs):
                self._met(batch)
        return made

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        tensors = list(tensors_in(inputs))
        rows = {len(tensor) for tensor in tensors if tensor.dim()}
        self._called(self._batches.of(tensors), module.training and torch.is_grad_enabled(), rows)


def _key(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for an empty or storage-free tensor, and for a weight.

    A weight belongs to no batch, although an optimizer makes it from gradients of batches.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor inside of `torch.vmap` or of another function of `torch.func`
        return None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes that `tensor` occupies in its storage, as (begin, end)."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
