"""A probe of an optimizer: it is made while parameters look whole, and steps small tensors, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.oracle.division.layout import Region, Shape
from evener.parallel.redistribute import part_of
from evener.system import accelerators

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
Scope: TypeAlias = Literal["element", "tensor", "model"]
"""What decides how an element changes: its own values, those of its whole tensor, or those of other tensors."""

_SMALL = (5, 4, 2, 2, 2)
"""Largest size of the probe's tensors along each dim."""
_PARTS = ((0, 3), (3, 5), (5, 5))
"""Parts of a dim of these tensors: two uneven ones and an empty one."""
_SCALES = (1.0, 1e-6, 1e6)
"""Scales of the gradients in the probe's steps: some reach an optimizer's bound on norms, and some do not."""


def stand_ins(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters of the model's shapes that take no memory, for an optimizer that never steps."""
    return [nn.Parameter(p.detach().new_zeros(()).expand(p.shape), p.requires_grad) for p in model.parameters()]


@contextmanager
def looking_whole(parameters: Sequence[nn.Parameter], shapes: Sequence[Shape]) -> Iterator[None]:
    """Give parameters these shapes inside the context, with zeros that take no memory."""
    parts = [parameter.data for parameter in parameters]
    for parameter, shape in zip(parameters, shapes, strict=True):
        if parameter.shape != shape:
            parameter.data = parameter.data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, parts, strict=True):
            parameter.data = data


def keep_parts(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    shapes: Sequence[Shape],
    regions: Sequence[Region | None],
) -> None:
    """Keep only these regions of the state, and remove parameters without a region from the groups."""
    for parameter, shape, region in zip(parameters, shapes, regions, strict=True):
        if region is None:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape != parameter.shape:
                state[key] = part_of(value, region).clone()
    gone = {id(parameter) for parameter, region in zip(parameters, regions, strict=True) if region is None}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]


def whole_of(shape: Shape) -> Region:
    """Return the region of a whole tensor."""
    return tuple(((0, size),) for size in shape)


def scope_of(make: MakeOptimizer, shapes: Sequence[Shape], device: torch.device) -> Scope:
    """Return what the optimizer reads to change an element; `model` if it cannot step parts or draws random numbers.

    The probe steps small tensors instead of tensors of `shapes`: whole ones, cut ones, and some without the others.
    """
    probe = _Probe(make, shapes, device)
    halves = [[i < len(shapes) // 2 for i in range(len(shapes))], [i >= len(shapes) // 2 for i in range(len(shapes))]]
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            expected = probe.steps(probe.whole)
        except Exception:  # the user's code fails again outside of the probe
            return "model"
        if not all(probe.agrees(expected, probe.some(half)) for half in halves):
            return "model"
        cuts = [probe.cut(dim, interval) for dim in (0, 1) for interval in _PARTS]
        return "element" if all(probe.agrees(expected, cut) for cut in cuts) else "tensor"


class _Probe:
    """Steps an optimizer of some regions of small tensors."""

    def __init__(self, make: MakeOptimizer, shapes: Sequence[Shape], device: torch.device) -> None:
        self._make, self._shapes = make, [tuple(shape) for shape in shapes]
        draw, place = torch.Generator().manual_seed(0), accelerators.exact(device)
        small = [tuple(map(min, shape, (*_SMALL, *[1] * len(shape)))) for shape in self._shapes]
        self.whole: list[Region | None] = [whole_of(shape) for shape in small]
        self._weights = [torch.randn(s, generator=draw, dtype=torch.float64).to(place) for s in small]
        self._grads = [
            [scale * torch.randn(s, generator=draw, dtype=torch.float64).to(place) for s in small] for scale in _SCALES
        ]

    def some(self, chosen: Sequence[bool]) -> list[Region | None]:
        """Return the regions of some whole tensors."""
        return [region if keep else None for region, keep in zip(self.whole, chosen, strict=True)]

    def cut(self, dim: int, interval: tuple[int, int]) -> list[Region | None]:
        """Return a part of every tensor that has `dim`."""
        regions: list[Region | None] = []
        for region in self.whole:
            assert region is not None
            if dim < len(region):
                size = _SMALL[dim]
                n = region[dim][0][1]
                a, b = (-(-n * edge // size) if edge < size else n for edge in interval)
                region = (*region[:dim], ((a, b),) if a < b else (), *region[dim + 1 :])
            regions.append(region)
        return regions

    def steps(self, regions: Sequence[Region | None]) -> list[list[Tensor]]:
        """Return the regions of the weights after every step."""
        cut = [region or whole_of((0,) * len(shape)) for region, shape in zip(regions, self._shapes, strict=True)]
        parameters = [nn.Parameter(_part(w, region)) for w, region in zip(self._weights, cut, strict=True)]
        with looking_whole(parameters, self._shapes):
            optimizer = self._make(iter(parameters))
        keep_parts(optimizer, parameters, self._shapes, regions)
        steps = []
        for number, grads in enumerate(self._grads):
            for parameter, grad, region in zip(parameters, grads, cut, strict=True):
                parameter.grad = _part(grad, region)
            torch.manual_seed(number)
            optimizer.step()
            steps.append([parameter.detach().clone() for parameter in parameters])
        return steps

    def agrees(self, expected: Sequence[Sequence[Tensor]], regions: Sequence[Region | None]) -> bool:
        """Return whether steps of the regions alone give the same as steps of all."""
        try:
            steps = self.steps(regions)
        except Exception:  # the user's code may not support parts
            return False
        before: Sequence[Tensor] = self._weights
        for made, wanted in zip(steps, expected, strict=True):
            for part, whole, last, region in zip(made, wanted, before, regions, strict=True):
                if region is not None and whole.numel():
                    bound = 1e-7 * float((whole - last).abs().max()) + 1e-13 * float(whole.abs().max())
                    if not torch.isclose(part, _part(whole, region), rtol=0, atol=bound, equal_nan=True).all():
                        return False
            before = wanted
        return True


def _part(tensor: Tensor, region: Region) -> Tensor:
    return part_of(tensor, region).clone()
