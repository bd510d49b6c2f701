"""A model that is to be cut: what it does, where it may be cut, what its parts cost in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from evener.parallel.pipeline.cut import Cut, cuts
from evener.parallel.pipeline.spent import Spent, spent
from evener.parallel.pipeline.tensors import tensors_in
from evener.parallel.pipeline.trace import Trace, trace

WEIGHT_COPIES = 4
"""Of every trained parameter: itself, its gradient and two of the optimiser's."""
LOSS_COPIES = 3
"""Of what the model returns, while the loss is computed: log-probabilities, their gradient and that of the outputs."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, followed with one micro-batch.

    Attributes:
        skeleton: the model without memory.
        example: a micro-batch without memory.
        trace: of training.
        places: where it may be cut, in order.
        spent: by every operation of the trace.
    """

    skeleton: nn.Module
    example: Any
    trace: Trace
    places: Sequence[Cut]
    spent: Sequence[Spent]

    @property
    def ends(self) -> list[int]:
        """Number of operations in front of every place, and of all."""
        return [place.position for place in self.places] + [len(self.spent)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Operations between neighbouring places: from, to."""
        return list(pairwise([0, *self.ends]))

    def evaluated(self) -> Trace:
        """What the model does in evaluation."""
        return trace(self.skeleton, self.example, self.trace.device, training=False)

    def weight_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): weights, gradients, the optimiser's state."""
        return WEIGHT_COPIES * sum(one.weight_bytes for one in self.spent[begin:end])

    def kept_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): what backward needs of one micro-batch."""
        return sum(one.kept_bytes for one in self.spent[begin:end])

    def passing_bytes(self, begin: int, end: int) -> int:
        """Of operations [begin, end): the most that is there besides for a moment: gradients, what the loss makes."""
        loss = LOSS_COPIES * self._output_bytes() if end == len(self.spent) else 0
        return max([loss, *(one.gradient_bytes + one.weight_bytes for one in self.spent[begin:end])])

    def _output_bytes(self) -> int:
        output = next(iter(reversed(self.trace.graph.nodes)))
        return sum(tensor.nbytes for node in output.all_input_nodes for tensor in tensors_in(node.meta.get("value")))

    def boundary_bytes(self, position: int) -> int:
        """That live across the cut in front of the operation at `position`."""
        return next((place.nbytes for place in self.places if place.position == position), 0)


def subject(skeleton: nn.Module, example: Any, device: torch.device) -> Subject:
    """The model `skeleton`, followed in training with the micro-batch `example`."""
    traced = trace(skeleton, example, device)
    places, spendings = cuts(traced, skeleton), spent(traced, skeleton)
    return Subject(skeleton=skeleton, example=example, trace=traced, places=places, spent=spendings)
