"""Micro-batches of a batch, as equal as whole samples allow; their losses; and the header of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.records.errors import InvalidValue, require
from evener.records.schema import Part
from evener.tracer.nested import map_tensors, tensors_in

Loss = Callable[[Any, Any], Tensor]
"""Maps (model outputs, targets) to the mean loss over samples."""
LossWeight = Callable[[Any], float]
"""Counts in the targets what a loss is a mean over."""


def micro_batch_sizes(samples: int, micro_batches: int) -> list[int]:
    """Return samples of every micro-batch. Sizes differ by at most one, larger ones come first, and none is empty."""
    require(samples > 0, "samples", samples, "at least one")
    count = min(micro_batches, samples)
    return [samples // count + (i < samples % count) for i in range(count)]


def samples_in(batch: Any) -> int:
    """Return N of a batch, whose tensors have N samples in dim 0, or no dims.

    Raises:
        InvalidValue: A tensor has another length, or there is none.
    """
    samples: int | None = None
    for tensor in tensors_in(batch):
        if tensor.dim() == 0:
            continue
        samples = tensor.shape[0] if samples is None else samples
        if tensor.shape[0] != samples:
            allowed = f"{samples} samples in dim 0, as in the batch's first tensor (keep undivided tensors as buffers)"
            raise InvalidValue("batch", tuple(tensor.shape), allowed)
    if samples is None:
        raise InvalidValue("batch", batch, "a batch with at least one tensor of samples")
    return samples


def divided(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split `batch` into micro-batches of `sizes`. Tensors without dims, and other values, go into each of them."""
    micro_batches, start = [], 0
    for size in sizes:
        micro_batches.append(map_tensors(batch, lambda t, a=start, b=start + size: t[a:b] if t.dim() else t))  # type: ignore[misc]
        start += size
    return micro_batches


def resized(batch: Any, samples: int) -> Any:
    """Return tensors on the meta device, shaped like those of `batch` but with this number of samples."""
    return map_tensors(batch, lambda t: t.new_empty((samples, *t.shape[1:]) if t.dim() else (), device="meta"))


def joined(outputs: Sequence[Any]) -> Any:
    """Join the model's outputs for several micro-batches, as if there had been one batch."""
    first = list(tensors_in(outputs[0]))
    rows = zip(*(tensors_in(output) for output in outputs), strict=True)
    whole = {id(tensor): torch.cat(row) if tensor.dim() else row[0] for tensor, row in zip(first, rows, strict=True)}
    return map_tensors(outputs[0], lambda tensor: whole[id(tensor)])


def scaled_loss(
    loss: Loss, weight: LossWeight, targets: Any, sizes: Sequence[int], total: float | None, device: torch.device
) -> Callable[[Any, int], Tensor]:
    """Return the loss of (model outputs, micro-batch), scaled so that it sums to the batch's loss.

    Args:
        loss: Mean over what `weight` counts.
        weight: Counts a micro-batch's targets.
        targets: Targets of the batch.
        sizes: Samples of every micro-batch.
        total: Count of the whole batch, over all replicas; by default that of `targets`.
        device: Device of the last stage.

    Raises:
        InvalidValue: Targets are missing, or their number differs from that of the inputs.
    """
    if targets is None or samples_in(targets) != sum(sizes):
        got = "none" if targets is None else f"{samples_in(targets)} samples"
        raise InvalidValue("targets", got, f"given on the last stage, for the {sum(sizes)} samples of the inputs")
    parts = [map_tensors(part, lambda tensor: tensor.to(device)) for part in divided(targets, sizes)]
    weights = [weight(part) for part in parts]
    whole = sum(weights) if total is None else total
    return lambda outputs, i: loss(outputs, parts[i]) * (weights[i] / whole)


class BatchHeader(Part, frozen=True, kw_only=True):
    """The message of the first stage to the others: a seed for random layers, and shapes and dtypes of the inputs."""

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, inputs: Any, example: Any) -> BatchHeader:
        """Return the header of a step on `inputs`, with a seed from the process's generator.

        Raises InvalidValue if `inputs` do not have the structure of `example`.
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
        """Number of samples N."""
        return next(shape[0] for shape in self.shapes if shape)

    def inputs(self, example: Any) -> Any:
        """Return tensors on the meta device like the inputs, in the structure of `example`."""
        pairs = iter(zip(self.shapes, self.dtypes, strict=True))

        def like(_tensor: Tensor) -> Tensor:
            shape, dtype = next(pairs)
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

        return map_tensors(example, like)
