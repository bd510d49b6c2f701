"""Convolutions of divided images and volumes: each rank has a box, and receives a halo while it computes.

A convolution is linear in its input, so the halo's contribution to the outputs can be added when the halo arrives. A
rank convolves its own box as a whole, without a copy, while the halo is in flight. Backward sends the halo's gradient
first and computes the gradient of its own box meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Operation, Sliding
from evener.oracle.division.plan import OperationPlan
from evener.parallel.box_ops import Box, compute_dtype, held_by, margins, reached, surround, touched


@dataclass(frozen=True)
class Convolution:
    """Computes some `outputs` of a convolution from the pixels `held`, with zeros for all others."""

    windows: tuple[Sliding, ...]
    groups: int
    held: Box
    outputs: Box

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, (N, F, *sizes), from `x` (N, C, *sizes)."""
        padding, x = self._pad(x)
        return torch.ops.aten.convolution(x, weight, bias, *self._settings(padding))  # type: ignore[no-any-return]

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return those gradients of x, weight and bias that are `wanted`."""
        padding, padded = self._pad(x)
        sizes = [weight.shape[0]]
        dx, d_weight, d_bias = torch.ops.aten.convolution_backward(
            dy, padded, weight, sizes, *self._settings(padding), list(wanted)
        )
        if dx is not None and padded is not x:
            dx = surround(dx, reached(self.windows, self.outputs), self.held)
        return dx, d_weight, d_bias

    def _pad(self, x: Tensor) -> tuple[list[int], Tensor]:
        """Return the padding that the kernel can add itself, and `x` padded by the rest."""
        wanted = reached(self.windows, self.outputs)
        around = margins(self.held, wanted)
        if all(
            _adds_itself(*one) for one in zip(self.windows, around, self.held.shape, self.outputs.shape, strict=True)
        ):
            return [before for before, _ in around], x
        return [0] * len(around), surround(x, self.held, wanted)

    def _settings(self, padding: list[int]) -> tuple[object, ...]:
        strides, dilations = ([getattr(w, name) for w in self.windows] for name in ("stride", "dilation"))
        return strides, padding, dilations, False, [0] * len(padding), self.groups


def _adds_itself(window: Sliding, around: tuple[int, int], inputs: int, outputs: int) -> bool:
    """Return whether equal padding before and behind gives the right number of outputs."""
    before, behind = around
    return before >= behind >= 0 and (inputs + 2 * before - window.extent) // window.stride + 1 == outputs


@dataclass(frozen=True)
class Seam:
    """The convolution of a box of the halo, and the position of its outputs among the rank's outputs."""

    convolution: Convolution
    place: tuple[slice, ...]


class StripConvolution:
    """One rank's part of a convolution of divided images or volumes.

    Args:
        group: The ranks of the replica.
        operation: The convolution.
        shape: Shape of its whole input (N, C, ...).
        step: The plan of the operation.
    """

    def __init__(self, group: Group, operation: Operation, shape: Shape, step: OperationPlan) -> None:
        windows: Any = operation.windows
        have, groups = step.choice.needs[0], operation.groups
        reach = step.choice.reach or have
        self.outputs = held_by(step.choice.gives, group.rank, operation.shape)
        held, needed = (held_by(layout, group.rank, shape) for layout in (have, reach))
        core = held.common(needed)
        self.core = None if core.is_empty or self.outputs.is_empty else Convolution(windows, groups, core, self.outputs)
        self._held = held
        halos = [self._halos(held_by(have, r, shape), held_by(reach, r, shape)) for r in range(group.size)]
        num_routes = max(map(len, halos))
        owned = tuple(have.region(r, shape) for r in range(group.size))
        routes = [Route(owned, tuple(_region(one[i : i + 1], shape) for one in halos)) for i in range(num_routes)]
        self.exchange = Exchange(group, routes, step.halo.kind if step.halo is not None else "halo")
        self.seams = [self._seam(windows, groups, halo) for halo in halos[group.rank]]

    def core_of(self, x: Tensor) -> Tensor:
        """Return this rank's pixels that its own outputs read, as a view."""
        assert self.core is not None
        return self.core.held.of(x, self._held)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's outputs from its pixels `x`."""
        dtype = compute_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return cast(Tensor, _Convolve.apply(self, x, weight, bias))  # type: ignore[no-untyped-call]

    @staticmethod
    def _halos(held: Box, needed: Box) -> list[Box]:
        return [] if needed.is_empty else needed.without(held.common(needed))

    def _seam(self, windows: tuple[Sliding, ...], groups: int, halo: Box) -> Seam | None:
        outputs = touched(windows, halo).common(self.outputs)
        if outputs.is_empty:
            return None
        return Seam(Convolution(windows, groups, halo, outputs), outputs.place_in(self.outputs))


def _region(halo: Sequence[Box], shape: Shape) -> tuple[tuple[tuple[int, int], ...], ...]:
    sides = [(side,) for side in halo[0].sides] if halo else [()] * (len(shape) - 2)
    return ((0, shape[0]),), ((0, shape[1]),), *sides


class _Convolve(torch.autograd.Function):
    """Maps (x, weight, bias) to this rank's outputs."""

    @staticmethod
    def forward(ctx: Any, strip: StripConvolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        receive = strip.exchange.begin_all_gather([x])
        if strip.core is not None:
            y = strip.core.forward(strip.core_of(x), weight, bias)
        else:
            y = weight.new_zeros(len(x), len(weight), *strip.outputs.shape)
            y = y if bias is None else y + bias.view(-1, *[1] * (x.dim() - 2))
        halos = receive()
        for seam, halo in zip(strip.seams, halos, strict=False):
            if seam is not None:
                y[seam.place] += seam.convolution.forward(halo, weight, None)
        ctx.strip = strip
        ctx.save_for_backward(x, weight, *halos)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        strip: StripConvolution = ctx.strip
        x, weight, *halos = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        d_halos, d_weights = _seams_backward(strip, dy, weight, halos, wanted)
        add_halos = strip.exchange.begin_reduce_scatter(d_halos) if wanted[0] else None
        d_core = d_weight = d_bias = None
        if strip.core is not None:
            d_core, d_weight, d_bias = strip.core.backward(dy.contiguous(), strip.core_of(x), weight, wanted)
        elif wanted[2]:
            d_bias = dy.sum((0, *range(2, dy.dim())))
        dx = add_halos([_spread_out(d_core, x, strip)])[0] if add_halos is not None else None
        if wanted[1]:
            d_weight = sum(d_weights, start=d_weight if d_weight is not None else torch.zeros_like(weight))
        return None, dx, d_weight, d_bias


def _seams_backward(
    strip: StripConvolution, dy: Tensor, weight: Tensor, halos: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the boxes of the halo, and of the weight from each box."""
    d_halos, d_weights = [], []
    for i, halo in enumerate(halos):
        seam = strip.seams[i] if i < len(strip.seams) else None
        d_halo = d_weight = None
        if seam is not None:
            part = dy[seam.place].contiguous()
            d_halo, d_weight, _ = seam.convolution.backward(part, halo, weight, (wanted[0], wanted[1], False))
        d_halos.append(d_halo if d_halo is not None else torch.zeros_like(halo))
        d_weights += [d_weight] if d_weight is not None else []
    return d_halos, d_weights


def _spread_out(d_core: Tensor | None, x: Tensor, strip: StripConvolution) -> Tensor:
    """Return the gradient of all pixels of this rank from that of the pixels that its outputs read."""
    if d_core is None:
        return torch.zeros_like(x)
    if d_core.shape == x.shape:
        return d_core
    dx = torch.zeros_like(x)
    strip.core_of(dx).copy_(d_core)
    return dx
