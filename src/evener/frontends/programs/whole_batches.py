"""Comparison of the gradients of batches that are not divided, which all nodes have to compute alike.

A program may take its batches from elsewhere than `run.prepare` or `run.share`. Every node then computes all of them,
and the result is that of one process if the batches are the same. A sampler with a generator of its own draws other
batches on every node, whose gradients differ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from evener.comm.group import Group
from evener.frontends.programs.batch_parts import OpenParts
from evener.frontends.programs.totals import numbers_of_ranks
from evener.training.differences import as_real

_ELEMENTS = 16
"""Elements of each gradient that are compared."""
_ALIKE = 1e-2
"""Largest difference of alike gradients, relative to the largest norm so far: machines round differently."""
_TOPIC = "the gradients of a batch that is not divided"


class WholeBatches:
    """The gradients of this rank since the last update, from batches that are not divided.

    Args:
        group: the ranks.
        parts: that this rank computes now.
        patience: seconds of silence after which a rank is lost.
    """

    def __init__(self, group: Group, parts: OpenParts, patience: float) -> None:
        self._group, self._parts, self._patience = group, parts, patience
        self._sampled: dict[int, Tensor] = {}
        self._largest = 0.0

    def observe(self, weight: Tensor, gradient: Tensor) -> None:
        """Note a gradient of `weight` that a `backward()` has computed on this rank."""
        if not self._parts.are_any and gradient.layout == torch.strided:
            self._sampled[id(weight)] = self._sampled.get(id(weight), 0.0) + _sampled(gradient)

    def difference(self, weights: Iterable[Tensor]) -> str:
        """Return a sentence if ranks have different gradients of `weights` since the last call; empty if they do not.

        All ranks call this. Weights whose gradients are not averaged need no comparison: each rank then trains as one
        process does.
        """
        observed, self._sampled = self._sampled, {}
        if not observed:
            return ""
        numbers = torch.cat([observed.get(id(one), torch.zeros_like(_sampled(one))) for one in weights]).numpy()
        table = torch.from_numpy(numbers_of_ranks(self._group, _TOPIC, numbers, self._patience)).nan_to_num()
        self._largest = max(self._largest, float(table.norm(dim=1).max()))
        differing = (table - table[0]).norm(dim=1) > _ALIKE * self._largest
        if not differing.any():
            return ""
        first, other = self._group.nodes[0], self._group.nodes[int(differing.nonzero()[0])]
        return (
            f"no batch is divided, and nodes {first} and {other} have computed different gradients, so they took "
            "different batches or random numbers: give the loader to run.prepare, take batches through run.share, or "
            "seed what draws them, as in torch.Generator().manual_seed(0)"
        )


def _sampled(tensor: Tensor) -> Tensor:
    """Return a few elements of `tensor`, evenly spaced, in float64, shape (elements,)."""
    flat = as_real(tensor.detach()).flatten()
    return flat[:: -(-len(flat) // _ELEMENTS) or 1].double().cpu()
