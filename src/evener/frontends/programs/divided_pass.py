"""One rank's passes through a model whose layers the ranks divide, while every rank holds the whole model.

before      copy parts of weights and buffers from the whole ones, where those have changed
after       gather buffers, such as running statistics
backward    gather gradients of the parts and add them to those of the whole weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.comm.exchange import Exchange, Route, shape_of
from evener.comm.group import Group
from evener.oracle.division.layout import ALIKE, WHOLE, Layout, Move, Shape
from evener.oracle.division.plan import Arrangement
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.redistribute import mover, part_of, regions
from evener.parallel.sharded import ShardedModule


class DividedPass:
    """Training passes through `model`, in the current modes of its modules.

    Args:
        model: whole, alike on every rank.
        group: the ranks.
        arrangement: division of layers among the ranks.
        inputs: example inputs.

    Attributes:
        sums: completes the gradients of the parts during backward.

    Raises:
        InvalidInput: the model cannot be followed, or has a weight that cannot be divided.
    """

    def __init__(self, model: nn.Module, group: Group, arrangement: Arrangement, inputs: Sequence[Tensor]) -> None:
        self._model, self._group = model, group
        self._sharded = ShardedModule(model, ProcessMesh(group, group, arrangement, 0), inputs)
        self._shards = self._sharded.state_shards()
        self.sums = self._sharded.sums
        divided = [held for held in self._sharded.held().parameters if held.route is not None]
        self._divided = {held.name: held for held in divided}
        self._weights = _Gathering(group, [held.route for held in divided if held.route is not None], "gradients")
        buffers = {name for name, _ in self._sharded.part.named_buffers()}
        self._buffers = [name for name, one in self._shards.items() if name in buffers and one.layout.state == "split"]
        routes = [_to_all(self._shards[name].layout, self._shards[name].shape, group.size) for name in self._buffers]
        self._statistics = _Gathering(group, routes, "statistics")

    @property
    def divides(self) -> bool:
        """Whether any layer is divided."""
        steps = self._sharded.plan.steps
        return any(step.choice.gives.state in ("split", "partial") or step.choice.mode for step in steps)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Return the model's outputs for whole inputs, whole on every rank."""
        self._take_state()
        outputs = self._sharded(*(self._of_all(x) if x.requires_grad else x for x in inputs))
        self._give_buffers()
        return outputs

    def give_gradients(self) -> bool:
        """Add the gradients of the parts to the model's; return whether there were any. Every rank calls this."""
        if self.sums.has_started:
            self.sums.finish()
        rows = self._group.all_gather_bytes(bytes(held.part.grad is not None for held in self._divided.values()))
        parts = [held.part for held in self._divided.values()]
        gathered = self._weights.of([torch.zeros_like(p) if p.grad is None else p.grad for p in parts])
        whole = dict(zip(self._divided, gathered, strict=True))
        has_any = dict(zip(self._divided, map(any, zip(*rows, strict=True)), strict=True))
        has_added = False
        for name, part in self._sharded.part.named_parameters():
            grad = (whole[name] if has_any[name] else None) if name in whole else part.grad
            part.grad = None
            if grad is not None:
                _add(self._model.get_parameter(name), grad)
                has_added = True
        return has_added

    def _of_all(self, x: Tensor) -> Tensor:
        """Return `x` such that its gradient is the sum over all ranks."""
        return mover(Move(0, tuple(x.shape), self._group.size, ALIKE, WHOLE), self._group)(x)

    @torch.no_grad()
    def _take_state(self) -> None:
        local, whole = self._sharded.part.state_dict(), self._model.state_dict()
        for name, shard in self._shards.items():
            part = part_of(whole[name], shard.layout.region(self._group.rank, shard.shape))
            if not torch.equal(local[name], part):  # a copy would invalidate what an earlier pass saved for backward
                local[name].copy_(part)

    @torch.no_grad()
    def _give_buffers(self) -> None:
        buffers = dict(self._sharded.part.named_buffers())
        gathered = self._statistics.of([buffers[name] for name in self._buffers])
        buffers |= dict(zip(self._buffers, gathered, strict=True))
        for name, buffer in self._model.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                buffer.copy_(buffers[name])


class _Gathering:
    """An all-gather of tensors from their parts on all ranks.

    Args:
        group: the ranks.
        routes: of the tensors, in order.
        kind: of what is sent.
    """

    def __init__(self, group: Group, routes: Sequence[Route], kind: str) -> None:
        self._group, self._routes, self._kind = group, routes, kind
        self._exchanges: dict[torch.dtype, Exchange] = {}

    def of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole tensors; every rank calls this with its parts."""
        gathered = list(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
            routes = [self._routes[i] for i in chosen]
            if dtype not in self._exchanges:
                numbered = [Route(route.owned, route.need, source=i) for i, route in enumerate(routes)]
                self._exchanges[dtype] = Exchange(self._group, numbered, self._kind)
            shapes = [shape_of(route.owned[self._group.rank]) for route in routes]
            blocks = [parts[i].reshape(shape) for i, shape in zip(chosen, shapes, strict=True)]
            for i, whole in zip(chosen, self._exchanges[dtype].all_gather(blocks), strict=True):
                gathered[i] = whole
        return gathered


def _to_all(layout: Layout, shape: Shape, size: int) -> Route:
    return Route(regions(layout, shape, size), regions(WHOLE, shape, size))


def _add(weight: nn.Parameter, grad: Tensor) -> None:
    """Add `grad` to the gradient of `weight`, as autograd does."""
    grad = grad.view_as(weight)
    if weight.grad is None:
        weight.grad = grad
    elif weight.grad.is_sparse:
        weight.grad = weight.grad + grad
    else:
        weight.grad.add_(grad)
