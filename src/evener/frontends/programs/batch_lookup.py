"""The batches that a program was given, known again by their tensors: what it computes later is still of that batch.

HandedBatches   which batch a tensor is of, as long as anything of the batch is there
Provenance      follows what the program makes of a batch, up to the model that it calls with it
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

_MOST_OF_A_STORAGE = 64
"""Tensors in one piece of memory, such as rows of all data, of which the last ones are known."""


@dataclass(frozen=True, kw_only=True)
class HandedBatch:
    """A batch, or a rank's part of it, as the program was given it.

    Attributes:
        number: in the order in which batches were given, from 1.
        owner: what gave it.
        part: of the batch.
        weight: how often what is computed of it counts.
        is_training: whether it was given to be trained on.
    """

    number: int
    owner: object
    part: BatchPart
    weight: float
    is_training: bool


class _Memory:
    """What lies in one storage: where tensors of batches begin and end, and what batches they are of."""

    def __init__(self, tensor: Tensor) -> None:
        make: Any = StorageWeakRef
        self._storage = make(tensor.untyped_storage())  # the address is not used again while this is there
        self._tensors: list[tuple[int, int, int, HandedBatch]] = []

    @property
    def is_there(self) -> bool:
        """Whether anything still refers to it."""
        return not self._storage.expired()

    @property
    def batches(self) -> list[HandedBatch]:
        """Those that it has tensors of."""
        return [batch for *_, batch in self._tensors]

    def add(self, tensor: Tensor, batch: HandedBatch) -> None:
        """`tensor`, which lies here, is of `batch`."""
        begin, end = _extent(tensor)
        self._tensors = [one for one in self._tensors if one[1:3] != (begin, end)][-_MOST_OF_A_STORAGE:]
        insort(self._tensors, (batch.number, begin, end, batch), key=lambda one: one[0])

    def of(self, tensor: Tensor) -> HandedBatch | None:
        """The last batch of which `tensor` is a part."""
        place = _extent(tensor)[0]
        return next((batch for _, begin, end, batch in reversed(self._tensors) if begin <= place < end), None)


class HandedBatches:
    """The batches of a program."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._last: dict[object, HandedBatch] = {}
        self._number = 0

    def give(self, batch: Any, owner: object, part: BatchPart, weight: float, is_training: bool) -> HandedBatch:
        """The program is given `batch`."""
        self._number += 1
        given = HandedBatch(number=self._number, owner=owner, part=part, weight=weight, is_training=is_training)
        self._last[owner] = given
        self.know(tensors_in(batch), given)
        return given

    def know(self, tensors: Iterable[Tensor], batch: HandedBatch) -> None:
        """`tensors` are made of `batch`."""
        for tensor in tensors:
            key = _key(tensor)
            if key is not None:
                self._memories.setdefault(key, _Memory(tensor)).add(tensor, batch)

    def of(self, tensors: Iterable[Tensor]) -> HandedBatch | None:
        """The last batch that any of `tensors` is of; None if nobody knows."""
        memories = ((self._memories.get(_key(tensor) or 0), tensor) for tensor in tensors)
        found = [batch for memory, tensor in memories if memory and (batch := memory.of(tensor)) is not None]
        return max(found, key=lambda batch: batch.number, default=None)

    def is_last(self, batch: HandedBatch) -> bool:
        """Whether its owner has given none since."""
        return self._last.get(batch.owner) is batch

    def leave(self, owner: object) -> None:
        """What `owner` gave last is not what is computed from now on."""
        self._last.pop(owner, None)

    def are_kept(self) -> bool:
        """Whether the program still has a batch that it was to train on, other than the last one of a loader."""
        self._memories = {key: memory for key, memory in self._memories.items() if memory.is_there}
        found = (memory.batches for memory in self._memories.values())
        held = [batches[0] for batches in found if len(batches) == 1]  # else it is there as all data are
        return any(batch.is_training and not self.is_last(batch) for batch in held)


class Provenance(TorchFunctionMode):
    """Follows tensors from a batch to the calls of models.

    Args:
        batches: as they are given to the program.
        called: called with the batch that a model is called with, None if nobody knows, and with whether it trains.
        met: called with a batch that meets something that is trained, such as outputs in a loss.
    """

    def __init__(
        self,
        batches: HandedBatches,
        called: Callable[[HandedBatch | None, bool], None],
        met: Callable[[HandedBatch], None],
    ) -> None:
        super().__init__()
        self._batches, self._called, self._met = batches, called, met
        self._calls = ModelCalls(self._enter, lambda: None)

    def follow(self, model: nn.Module) -> None:
        """Find out of what batches `model`, or a module in it, is called."""
        self._calls.follow(model)

    def begin(self) -> None:
        """Be active in this thread from now on."""
        begin_mode(self)

    def end(self) -> None:
        """Be active no more."""
        self._calls.end()
        end_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`func`; what it makes of a tensor of a batch is of that batch."""
        made = func(*args, **(kwargs or {}))
        if not self._calls.is_inside:
            given = list(tensors_in((args, kwargs)))
            batch = self._batches.of(given)
            if batch is not None:
                self._batches.know(tensors_in(made), batch)
            if batch is not None and any(tensor.requires_grad for tensor in given):
                self._met(batch)
        return made

    def _enter(self, module: nn.Module, given: Any) -> None:
        self._called(self._batches.of(tensors_in(given)), module.training and torch.is_grad_enabled())


def _key(tensor: Tensor) -> int | None:
    """Of its storage; None if it has none, or nothing is in it."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Of the memory that `tensor` lies in, from the first byte to the one after the last."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
