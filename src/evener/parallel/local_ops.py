"""This rank's part of each operation: a table from the operation's kind to a function of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from evener.oracle.division.network import Kind, Linear, Nearest, Spreading
from evener.parallel import box_ops
from evener.parallel.box_ops import empty_output
from evener.parallel.drawn_ops import dropout, of_all_samples
from evener.parallel.norms import group_norm
from evener.parallel.op_context import LocalOp, OpContext
from evener.parallel.redistribute import mover
from evener.parallel.shared_statistics import shared_by, with_all_replicas
from evener.parallel.spatial_convolution import StripConvolution
from evener.system.accelerators import moved


def local_op(ctx: OpContext) -> LocalOp:
    """Return this rank's part of the operation of `ctx`, in the modes that are set around it."""
    return _LOCAL_OPS[ctx.operation.kind](ctx)


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
