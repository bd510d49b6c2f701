"""What the first stage tells the others about a step: how the inputs are shaped, and the seed of random layers."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from evener.errors import InvalidValue
from evener.parallel.pipeline.batches import samples_in
from evener.schema import Part
from evener.tracer.nested import map_tensors, tensors_in


class Announcement(Part, frozen=True, kw_only=True):
    """A step, as all stages have to know it.

    Attributes:
        seed: of random layers.
        shapes: of the inputs' tensors, in order.
        dtypes: likewise, by their names in torch.
    """

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def samples(self) -> int:
        """N."""
        return next(shape[0] for shape in self.shapes if shape)

    def inputs(self, example: Any) -> Any:
        """Tensors without memory as announced, in the structure of `example`."""
        pairs = iter(zip(self.shapes, self.dtypes, strict=True))

        def announced(_tensor: torch.Tensor) -> torch.Tensor:
            shape, dtype = next(pairs)
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

        return map_tensors(example, announced)

    def encode(self) -> bytes:
        """As a message."""
        return msgspec.msgpack.encode(self)


def announce(inputs: Any, example: Any) -> Announcement:
    """Of a step on `inputs`, whose random layers draw from what the process's generator gives next.

    Raises:
        InvalidValue: `inputs` have not the structure of `example`.
    """
    tensors = list(tensors_in(inputs))
    if len(tensors) != len(list(tensors_in(example))):
        raise InvalidValue("inputs", f"{len(tensors)} tensors", f"{len(list(tensors_in(example)))}, as in the example")
    samples_in(inputs)
    return Announcement(
        seed=int(torch.randint(2**62, ()).item()),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
    )


def decode(message: bytes) -> Announcement:
    """Of a message."""
    return msgspec.msgpack.decode(message, type=Announcement)
