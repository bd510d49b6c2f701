"""This rank's part of each operation: a table from the operation's kind to a function of tensors.

In a convolution of divided images and volumes each rank has a box, and receives a halo while it computes. A convolution
is linear in its input, so the halo's contribution to the outputs can be added when the halo arrives. A rank convolves
its own box as a whole, without a copy, while the halo is in flight. Backward sends the halo's gradient first and
computes the gradient of its own box meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Kind, Linear, Nearest, Operation, Sliding, Spreading
from evener.oracle.division.plan import OperationPlan
from evener.parallel import box_ops
from evener.parallel.box_ops import Box, compute_dtype, empty_output, held_by, margins, reached, surround, touched
from evener.parallel.drawn_ops import dropout, of_all_samples
from evener.parallel.norms import group_norm
from evener.parallel.op_context import LocalOp, OpContext
from evener.parallel.redistribute import mover
from evener.parallel.shared_statistics import shared_by, with_all_replicas
from evener.system.accelerators import moved
from evener.system.processor_draws import ProcessorDraws


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


def local_op(ctx: OpContext) -> LocalOp:
    """Return this rank's part of the operation of `ctx`, in the modes that are set around it."""
    run = _LOCAL_OPS[ctx.operation.kind](ctx)
    is_random = ctx.call.is_random or isinstance(ctx.layer, nn.Dropout)
    return run if ctx.mesh.has_same_generators or not is_random else _drawn_on_processor(run)


def _drawn_on_processor(run: LocalOp) -> LocalOp:
    def drawn(inputs: Sequence[Tensor]) -> Tensor:
        with ProcessorDraws():
            return run(inputs)

    return drawn


def _call(ctx: OpContext) -> LocalOp:
    function = ctx.layer
    if isinstance(function, nn.Dropout):
        return dropout(ctx, function)
    has_others = ctx.call.is_random and len(ctx.mesh.arrangement.replicas) > 1
    return of_all_samples(ctx) if has_others else ctx.computing(ctx.call)


def _whole(ctx: OpContext) -> LocalOp:
    """Compute the whole operation on every rank, with the statistics of all samples."""
    layout, model, compute = ctx.step.choice.gives, ctx.model, ctx.computing(ctx.call)
    return with_all_replicas(compute, ctx.mesh, layout, lambda: model.training, lambda: ctx.samples()[1] > 0)


def _constant(ctx: OpContext) -> LocalOp:
    function = ctx.call.function
    if function is not None:
        return lambda _: function()
    find = operator.attrgetter(ctx.operation.name)
    return lambda _: find(ctx.model)


def _part(ctx: OpContext) -> LocalOp:
    """Return an interval of the channels that this rank has."""
    channels = ctx.step.choice.needs[0].region(ctx.rank, ctx.inputs[0].shape)[1]
    start = ctx.operation.bounds[0]
    before = sum(max(0, min(b, start) - a) for a, b in channels)
    width = ctx.shape[1]
    return lambda inputs: inputs[0].narrow(1, before, width)


def _average(ctx: OpContext) -> LocalOp:
    """Return the mean over all pixels, or this rank's addend of it."""
    need, shape = ctx.step.choice.needs[0], ctx.inputs[0].shape
    sides = tuple(range(2, len(shape)))
    if need.along(2) is None:
        return lambda inputs: inputs[0].mean(sides, keepdim=True)
    pixels = prod(shape[2:])
    return lambda inputs: inputs[0].sum(sides, keepdim=True) / pixels


def _layer(ctx: OpContext) -> LocalOp:
    layer, shape = ctx.layer, ctx.shape

    def run(inputs: Sequence[Tensor]) -> Tensor:
        if inputs[0].numel() == 0 and shared_by(layer) is None:
            return empty_output(shape, inputs[0], dtype=inputs[0].dtype)
        result: Tensor = layer(inputs[0])
        return result

    return run


def _filter(ctx: OpContext) -> LocalOp:
    """Compute y[own] = conv(x, w[own]), from all channels that these filters read."""
    layer, shape = ctx.layer, ctx.shape
    if 0 in shape:
        return lambda inputs: empty_output(shape, inputs[0], *layer.parameters())
    return lambda inputs: layer(inputs[0])


def _channel(ctx: OpContext) -> LocalOp:
    """Compute this rank's addend of y = sum of conv(x[own], w[:, own]); one rank adds the bias of each filter."""
    layer, shape, adds = ctx.layer, ctx.operation.shape, ctx.step.choice.adds
    assert adds is not None
    filters = torch.tensor([i for a, b in adds.region(ctx.rank, shape)[1] for i in range(a, b)], dtype=torch.long)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x, bias = inputs[0], layer.bias
        if bias is not None:
            bias = bias.new_zeros(shape[1]).index_copy(0, moved(filters, bias.device), bias)
        if x.numel() == 0:
            return _with_bias(empty_output(shape, x, *layer.parameters()), bias)
        y: Tensor = layer(x) if bias is None else functional_call(layer, {"bias": bias}, (x,))
        return y

    return run


def _strip(ctx: OpContext) -> LocalOp:
    if any(isinstance(one, Spreading) for one in ctx.operation.windows):
        return _transposed(ctx)
    strip, layer = StripConvolution(ctx.mesh.group, ctx.operation, ctx.inputs[0].shape, ctx.step), ctx.layer
    return lambda inputs: strip(inputs[0], layer.weight, layer.bias)


def _transposed(ctx: OpContext) -> LocalOp:
    """Compute a transposed convolution, after gathering what its windows read."""
    halo, layer, shape = ctx.step.halo, ctx.layer, ctx.shape
    bring = mover(halo, ctx.mesh.group) if halo is not None else None
    held, outputs = ctx.boxes(ctx.step.choice.reach or ctx.step.choice.needs[0])
    windows: Any = ctx.operation.windows

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = bring(inputs[0]) if bring is not None else inputs[0]
        if outputs.is_empty or held.is_empty:
            return _with_bias(empty_output(shape, x, layer.weight), layer.bias)
        return box_ops.transposed(x, layer, windows, held, outputs)

    return run


def _pool(ctx: OpContext) -> LocalOp:
    """Pool or resize a box, or all pixels of some channels."""
    if ctx.step.choice.gives.along(2) is None:
        return _layer(ctx)
    held, outputs = ctx.boxes(ctx.step.choice.needs[0])
    compute = _box_function(ctx)
    shape = ctx.shape
    if outputs.is_empty or held.is_empty:
        return lambda inputs: empty_output(shape, inputs[0], dtype=inputs[0].dtype)
    return lambda inputs: compute(inputs[0], ctx.operation.windows, held, outputs)


def _box_function(ctx: OpContext) -> Callable[..., Tensor]:
    layer, windows = ctx.layer, ctx.operation.windows
    if isinstance(layer, nn.MaxPool2d | nn.MaxPool3d):
        return lambda x, *where: box_ops.max_pool(x, layer, *where)
    if isinstance(layer, nn.AvgPool2d | nn.AvgPool3d):
        image = ctx.inputs[0].shape[2:]
        return lambda x, *where: box_ops.average_pool(x, layer, image, *where)
    if isinstance(layer, nn.AdaptiveMaxPool2d | nn.AdaptiveMaxPool3d):
        return box_ops.adaptive_maximum
    if isinstance(windows[0], Nearest):
        return box_ops.nearest
    return box_ops.linear if isinstance(windows[0], Linear) else box_ops.adaptive_average


def _batch_norm(ctx: OpContext) -> LocalOp:
    layer = ctx.layer
    if shared_by(layer) is not None or ctx.shape[1]:
        return _layer(ctx)

    def count_only(inputs: Sequence[Tensor]) -> Tensor:
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
        return empty_output(ctx.shape, inputs[0], *layer.parameters(), dtype=inputs[0].dtype)

    return count_only


def _group_norm(ctx: OpContext) -> LocalOp:
    if ctx.step.choice.gives.state != "split":
        return _layer(ctx)
    layer, operation = ctx.layer, ctx.operation
    width = operation.shape[1] // operation.groups
    group_of_channel = torch.tensor([c // width for a, b in ctx.region[1] for c in range(a, b)], dtype=torch.long)
    belongs = F.one_hot(group_of_channel, operation.groups)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        members = moved(belongs.to(torch.float64 if x.dtype == torch.float64 else torch.float32), x.device)
        return group_norm(x, layer.weight, layer.bias, members, layer.eps, ctx.mesh.group)

    return run


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))


_BY_MODE: dict[str, Callable[[OpContext], LocalOp]] = {
    "filter": _filter,
    "channel": _channel,
    "strip": _strip,
    "": _layer,
}
_LOCAL_OPS: dict[Kind, Callable[[OpContext], LocalOp]] = {
    "constant": _constant,
    "convolution": lambda ctx: _BY_MODE[ctx.step.choice.mode](ctx),
    "linear": lambda ctx: _BY_MODE[ctx.step.choice.mode](ctx),
    "pool": _pool,
    "resize": _pool,
    "average": _average,
    "pointwise": _call,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "concat": lambda ctx: lambda inputs: torch.cat(list(inputs), ctx.operation.concat_dim),
    "part": _part,
    "flatten": lambda _: lambda inputs: inputs[0].flatten(1),
    "item": _call,
    "other": _call,
    "whole": _whole,
}
