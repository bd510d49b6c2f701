"""A batch as micro-batches, as equal as whole samples can be; their losses; and the header of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.records.errors import InvalidValue, require
from evener.records.schema import Part
from evener.tracer.nested import map_tensors, tensors_in

Loss = Callable[[Any, Any], Tensor]
"""Mean loss over samples, from what the model returned for them and their targets."""
LossWeight = Callable[[Any], float]
"""What a loss is a mean over, counted in the targets."""


def micro_batch_sizes(samples: int, micro_batches: int) -> list[int]:
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


def scaled_loss(
    loss: Loss, weight: LossWeight, targets: Any, sizes: Sequence[int], total: float | None, device: torch.device
) -> Callable[[Any, int], Tensor]:
    """The loss of (what the model returned, micro-batch), so that the sum over micro-batches is that of the batch.

    Args:
        loss: mean over what `weight` counts.
        weight: of a micro-batch's targets.
        targets: of the batch.
        sizes: samples of every micro-batch.
        total: what `weight` counts in the whole batch, over all replicas; by default in `targets`.
        device: of the last stage.

    Raises:
        InvalidValue: targets are missing, or not as many as inputs.
    """
    if targets is None or samples_in(targets) != sum(sizes):
        got = "none" if targets is None else f"{samples_in(targets)} samples"
        raise InvalidValue("targets", got, f"given where the last stage is, for the {sum(sizes)} samples of the inputs")
    parts = [map_tensors(part, lambda tensor: tensor.to(device)) for part in divided(targets, sizes)]
    weights = [weight(part) for part in parts]
    whole = sum(weights) if total is None else total
    return lambda outputs, i: loss(outputs, parts[i]) * (weights[i] / whole)


class BatchHeader(Part, frozen=True, kw_only=True):
    """What the first stage sends the others: the seed of random layers, shapes and dtypes of the inputs' tensors."""

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, inputs: Any, example: Any) -> BatchHeader:
        """Of a step on `inputs`, whose random layers draw from what the process's generator gives next.

        Raises InvalidValue if `inputs` have not the structure of `example`.
        """
        tensors, expected = list(tensors_in(inputs)), len(list(tensors_in(example)))
        require(len(tensors) == expected, "inputs", f"{len(tensors)} tensors", f"{expected}, as in the example")
        samples_in(inputs)
        return cls(
            seed=int(torch.randint(2**62, ()).item()),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        )

    @property
    def samples(self) -> int:
        """N."""
        return next(shape[0] for shape in self.shapes if shape)

    def inputs(self, example: Any) -> Any:
        """Tensors without memory like the inputs, in the structure of `example`."""
        pairs = iter(zip(self.shapes, self.dtypes, strict=True))

        def like(_tensor: Tensor) -> Tensor:
            shape, dtype = next(pairs)
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

        return map_tensors(example, like)
