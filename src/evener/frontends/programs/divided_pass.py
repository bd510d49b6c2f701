"""One rank's passes through a model whose layers the ranks divide, while the model itself is whole on all of them.

before      parts of weights and buffers are taken from the whole ones, where those have changed
after       buffers, such as running statistics, are whole again
backward    gradients of the parts are gathered, and added to those of the whole weights
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
    """Passes through `model` that train, in the modes that its modules have now.

    Args:
        model: whole, alike on every rank.
        group: the ranks.
        arrangement: how they divide layers.
        inputs: an example.

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
        """Whether any work is divided at all."""
        steps = self._sharded.plan.steps
        return any(step.choice.gives.state in ("split", "partial") or step.choice.mode for step in steps)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """The model's outputs, whole on every rank, of whole inputs."""
        self._take_state()
        outputs = self._sharded(*(self._of_all(x) if x.requires_grad else x for x in inputs))
        self._give_buffers()
        return outputs

    def give_gradients(self) -> bool:
        """Add the gradients of the parts, if there are any, to those of the model's weights; every rank calls this."""
        if self.sums.has_started:
            self.sums.finish()
        rows = self._group.all_gather_bytes(bytes(held.part.grad is not None for held in self._divided.values()))
        parts = [held.part for held in self._divided.values()]
        found = self._weights.of([torch.zeros_like(p) if p.grad is None else p.grad for p in parts])
        whole = dict(zip(self._divided, found, strict=True))
        has_any = dict(zip(self._divided, map(any, zip(*rows, strict=True)), strict=True))
        given = False
        for name, part in self._sharded.part.named_parameters():
            grad = (whole[name] if has_any[name] else None) if name in whole else part.grad
            part.grad = None
            if grad is not None:
                _add(self._model.get_parameter(name), grad)
                given = True
        return given

    def _of_all(self, x: Tensor) -> Tensor:
        """An input whose gradient is the sum of those that the ranks have for it."""
        return mover(Move(0, tuple(x.shape), self._group.size, ALIKE, WHOLE), self._group)(x)

    @torch.no_grad()
    def _take_state(self) -> None:
        own, whole = self._sharded.part.state_dict(), self._model.state_dict()
        for name, shard in self._shards.items():
            part = part_of(whole[name], shard.layout.region(self._group.rank, shard.shape))
            if not torch.equal(own[name], part):  # else a pass before this one may still want what it has kept
                own[name].copy_(part)

    @torch.no_grad()
    def _give_buffers(self) -> None:
        own = dict(self._sharded.part.named_buffers())
        found = self._statistics.of([own[name] for name in self._buffers])
        own |= dict(zip(self._buffers, found, strict=True))
        for name, buffer in self._model.named_buffers():
            if not torch.equal(buffer, own[name]):
                buffer.copy_(own[name])


class _Gathering:
    """Makes tensors whole on all ranks, of which these have parts.

    Args:
        group: the ranks.
        routes: of the tensors, in order.
        kind: of what is sent.
    """

    def __init__(self, group: Group, routes: Sequence[Route], kind: str) -> None:
        self._group, self._routes, self._kind = group, routes, kind
        self._exchanges: dict[torch.dtype, Exchange] = {}

    def of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors; every rank calls this with its parts."""
        found = list(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
            routes = [self._routes[i] for i in chosen]
            if dtype not in self._exchanges:
                numbered = [Route(route.own, route.need, source=i) for i, route in enumerate(routes)]
                self._exchanges[dtype] = Exchange(self._group, numbered, self._kind)
            own = [shape_of(route.own[self._group.rank]) for route in routes]
            given = [parts[i].reshape(shape) for i, shape in zip(chosen, own, strict=True)]
            for i, whole in zip(chosen, self._exchanges[dtype].all_gather(given), strict=True):
                found[i] = whole
        return found


def _to_all(layout: Layout, shape: Shape, size: int) -> Route:
    return Route(regions(layout, shape, size), regions(WHOLE, shape, size))


def _add(weight: nn.Parameter, grad: Tensor) -> None:
    """As autograd adds gradients."""
    grad = grad.view_as(weight)
    if weight.grad is None:
        weight.grad = grad
    elif weight.grad.is_sparse:
        weight.grad = weight.grad + grad
    else:
        weight.grad.add_(grad)
