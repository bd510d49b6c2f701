"""A batch as micro-batches: equal ones, or as equal as whole samples can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener.errors import InvalidValue, require
from evener.tracer.nested import map_tensors, tensors_in


def sizes_of(samples: int, micro_batches: int) -> list[int]:
    """Samples of every micro-batch: they differ by one at most, the larger ones come first; never an empty one."""
    require(samples > 0, "samples", samples, "at least one")
    count = min(micro_batches, samples)
    return [samples // count + (i < samples % count) for i in range(count)]


def samples_in(batch: Any) -> int:
    """N of a batch, all of whose tensors have N in dim 0, or no dim.

    Raises:
        InvalidValue: a tensor of another length.
    """
    found: int | None = None
    for tensor in tensors_in(batch):
        if tensor.dim() == 0:
            continue
        found = tensor.shape[0] if found is None else found
        if tensor.shape[0] != found:
            allowed = f"{found} samples in dim 0, as the first tensor of the batch (what is not divided: a buffer)"
            raise InvalidValue("batch", tuple(tensor.shape), allowed)
    if found is None:
        raise InvalidValue("batch", batch, "a batch with at least one tensor of samples")
    return found


def divided(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """`batch` as micro-batches of `sizes`; tensors without dims and other values go with every one of them."""
    found, start = [], 0
    for size in sizes:
        found.append(map_tensors(batch, lambda t, a=start, b=start + size: t[a:b] if t.dim() else t))  # type: ignore[misc]
        start += size
    return found


def resized(batch: Any, samples: int) -> Any:
    """Tensors without memory, shaped like those of `batch` but with so many samples."""
    return map_tensors(batch, lambda t: t.new_empty((samples, *t.shape[1:]) if t.dim() else (), device="meta"))


def joined(outputs: Sequence[Any]) -> Any:
    """What a model returned for several micro-batches, as if it had been one."""

    first = list(tensors_in(outputs[0]))
    rows = zip(*(tensors_in(output) for output in outputs), strict=True)
    whole = {id(tensor): torch.cat(row) if tensor.dim() else row[0] for tensor, row in zip(first, rows, strict=True)}
    return map_tensors(outputs[0], lambda tensor: whole[id(tensor)])
