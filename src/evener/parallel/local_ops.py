"""What this rank computes of each operation: a table from the operation's kind to a function of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from evener.oracle.division.layout import Layout, Region, Shape, length
from evener.oracle.division.network import Kind, Linear, Nearest, Operation, Spreading
from evener.oracle.division.plan import OperationPlan
from evener.parallel import rectangle_ops
from evener.parallel.batch_norm import GroupBatchNorm
from evener.parallel.divided_layers import ChannelParallel, FilterParallel, dropout, empty_output, group_norm
from evener.parallel.op_graph import At, Call, Item, filled
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.rectangle_ops import Rectangle, held_by
from evener.parallel.redistribute import mover
from evener.parallel.spatial_convolution import StripConvolution

LocalOp: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""From this rank's inputs, in the layouts that the plan says, to its output."""


@dataclass(frozen=True)
class OpContext:
    """What a local operation is made of.

    Attributes:
        operation: to be done.
        inputs: the operations whose outputs it reads.
        step: how the plan does it.
        call: what computes it in one process.
        model: this rank's part of the model.
        mesh: where this rank is.
        samples: (first one of this replica, number over all replicas) of the batch that is being computed.
    """

    operation: Operation
    inputs: tuple[Operation, ...]
    step: OperationPlan
    call: Call
    model: nn.Module
    mesh: ProcessMesh
    samples: Callable[[], tuple[int, int]]

    @property
    def rank(self) -> int:
        """Of this process in its replica."""
        return self.mesh.group.rank

    @property
    def gives(self) -> Layout:
        """Layout of the output."""
        return self.step.choice.gives

    @property
    def region(self) -> Region:
        """What this rank has of the output."""
        return self.gives.region(self.rank, self.operation.shape)

    @property
    def shape(self) -> Shape:
        """Shape of this rank's output."""
        return tuple(length(intervals) for intervals in self.region)

    @property
    def layer(self) -> Any:
        """This rank's part of the module that computes the operation."""
        return resolved(self.call.function, self.model)

    def rectangles(self, reach: Layout) -> tuple[Rectangle, Rectangle]:
        """What this rank has of the input, when it comes in layout `reach`, and what of the output."""
        return held_by(reach, self.rank, self.inputs[0].shape), held_by(self.gives, self.rank, self.operation.shape)


def local_op(ctx: OpContext) -> LocalOp:
    """What this rank computes of the operation of `ctx`."""
    found, modes = _LOCAL_OPS[ctx.operation.kind](ctx), ctx.call.modes
    if modes is None:
        return found

    def in_modes(inputs: Sequence[Tensor]) -> Tensor:
        with modes.applied():
            return found(inputs)

    return in_modes


def resolved(function: Any, model: nn.Module) -> Any:
    """The function itself, with modules of `model` where it stands for some."""
    if isinstance(function, At):
        return model.get_submodule(function.path)
    if isinstance(function, Item):
        inner = resolved(function.function, model)
        return lambda *args, **kwargs: inner(*args, **kwargs)[function.index]
    return function


def _call(ctx: OpContext) -> LocalOp:
    function = ctx.layer
    if isinstance(function, nn.Dropout):
        return _dropout(ctx, function)

    def call(inputs: Sequence[Tensor]) -> Tensor:
        args, kwargs = filled((ctx.call.args, ctx.call.kwargs), iter(inputs))
        result: Tensor = function(*args, **kwargs)
        return result

    return call


def _dropout(ctx: OpContext, layer: nn.Dropout) -> LocalOp:
    switch = layer if isinstance(ctx.call.function, At) else ctx.model
    shape, region, samples = ctx.operation.shape, ctx.region, ctx.samples
    return lambda inputs: dropout(inputs[0], layer.p, shape, region, samples()) if switch.training else inputs[0]


def _constant(ctx: OpContext) -> LocalOp:
    function = ctx.call.function
    if function is not None:
        return lambda _: function()
    find = operator.attrgetter(ctx.operation.name)
    return lambda _: find(ctx.model)


def _concat(ctx: OpContext) -> LocalOp:
    return lambda inputs: torch.cat(list(inputs), ctx.operation.concat_dim)


def _flatten(_: OpContext) -> LocalOp:
    return lambda inputs: inputs[0].flatten(1)


def _part(ctx: OpContext) -> LocalOp:
    """A stretch of the channels that this rank has."""
    own = ctx.step.choice.needs[0].region(ctx.rank, ctx.inputs[0].shape)[1]
    start = ctx.operation.bounds[0]
    before = sum(max(0, min(b, start) - a) for a, b in own)
    width = ctx.shape[1]
    return lambda inputs: inputs[0].narrow(1, before, width)


def _average(ctx: OpContext) -> LocalOp:
    """The mean over all pixels, or this rank's addend of it."""
    need, shape = ctx.step.choice.needs[0], ctx.inputs[0].shape
    if need.along(2) is None:
        return lambda inputs: inputs[0].mean((2, 3), keepdim=True)
    pixels = shape[2] * shape[3]
    return lambda inputs: inputs[0].sum((2, 3), keepdim=True) / pixels


def _convolution(ctx: OpContext) -> LocalOp:
    return _CONVOLUTIONS[ctx.step.choice.mode](ctx)


def _layer(ctx: OpContext) -> LocalOp:
    layer, shape = ctx.layer, ctx.shape

    def run(inputs: Sequence[Tensor]) -> Tensor:
        if inputs[0].numel() == 0 and not isinstance(layer, GroupBatchNorm):
            return empty_output(shape, inputs[0], dtype=inputs[0].dtype)
        result: Tensor = layer(inputs[0])
        return result

    return run


def _filter(ctx: OpContext) -> LocalOp:
    own = FilterParallel(ctx.layer, ctx.shape)
    return lambda inputs: own(inputs[0])


def _channel(ctx: OpContext) -> LocalOp:
    adds = ctx.step.choice.adds
    assert adds is not None
    own = ChannelParallel(ctx.layer, adds.region(ctx.rank, ctx.operation.shape)[1], ctx.operation.shape)
    return lambda inputs: own(inputs[0])


def _strip(ctx: OpContext) -> LocalOp:
    choice, windows, layer = ctx.step.choice, ctx.operation.windows, ctx.layer
    have, reach = choice.needs[0], choice.reach or choice.needs[0]
    if any(isinstance(one, Spreading) for one in windows):
        return _transposed(ctx)
    strip = StripConvolution(
        ctx.mesh.group,
        windows,  # type: ignore[arg-type]
        ctx.operation.groups,
        ctx.inputs[0].shape,
        have,
        reach,
        ctx.gives,
        ctx.operation.shape,
        ctx.step.halo.kind if ctx.step.halo is not None else "halo",
    )
    return lambda inputs: strip(inputs[0], layer.weight, layer.bias)


def _transposed(ctx: OpContext) -> LocalOp:
    """A transposed convolution: gets what its windows reach before it computes."""
    halo, layer, shape = ctx.step.halo, ctx.layer, ctx.shape
    bring = mover(halo, ctx.mesh.group) if halo is not None else None
    held, outputs = ctx.rectangles(ctx.step.choice.reach or ctx.step.choice.needs[0])
    windows: Any = ctx.operation.windows

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = bring(inputs[0]) if bring is not None else inputs[0]
        if outputs.is_empty or held.is_empty:
            y = empty_output(shape, x, layer.weight)
            return y if layer.bias is None else torch.add(y, layer.bias.to(y.dtype).view(-1, 1, 1))
        return rectangle_ops.transposed(x, layer, windows, held, outputs)

    return run


def _pool(ctx: OpContext) -> LocalOp:
    """Pooling or resizing of a rectangle, or of all pixels of some channels."""
    if ctx.gives.along(2) is None:
        return _layer(ctx)
    held, outputs = ctx.rectangles(ctx.step.choice.needs[0])
    compute = _rectangle_function(ctx)
    shape = ctx.shape
    if outputs.is_empty or held.is_empty:
        return lambda inputs: empty_output(shape, inputs[0], dtype=inputs[0].dtype)
    return lambda inputs: compute(inputs[0], ctx.operation.windows, held, outputs)


def _rectangle_function(ctx: OpContext) -> Callable[..., Tensor]:
    layer, windows = ctx.layer, ctx.operation.windows
    if isinstance(layer, nn.MaxPool2d):
        return lambda x, *where: rectangle_ops.max_pool(x, layer, *where)
    if isinstance(layer, nn.AvgPool2d):
        image = ctx.inputs[0].shape[2:]
        return lambda x, *where: rectangle_ops.average_pool(x, layer, image, *where)
    if isinstance(layer, nn.AdaptiveMaxPool2d):
        return rectangle_ops.adaptive_maximum
    if isinstance(windows[0], Nearest):
        return rectangle_ops.nearest
    return rectangle_ops.linear if isinstance(windows[0], Linear) else rectangle_ops.adaptive_average


def _batch_norm(ctx: OpContext) -> LocalOp:
    layer = ctx.layer
    if isinstance(layer, GroupBatchNorm) or ctx.shape[1]:
        return _layer(ctx)

    def count_only(inputs: Sequence[Tensor]) -> Tensor:
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
        return empty_output(ctx.shape, inputs[0], *layer.parameters(), dtype=inputs[0].dtype)

    return count_only


def _group_norm(ctx: OpContext) -> LocalOp:
    if ctx.gives.state != "split":
        return _layer(ctx)
    layer, operation = ctx.layer, ctx.operation
    width = operation.shape[1] // operation.groups
    own = torch.tensor([c // width for a, b in ctx.region[1] for c in range(a, b)], dtype=torch.long)
    belongs = torch.nn.functional.one_hot(own, operation.groups)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        members = belongs.to(x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return group_norm(x, layer.weight, layer.bias, members, layer.eps, ctx.mesh.group)

    return run


_CONVOLUTIONS: dict[str, Callable[[OpContext], LocalOp]] = {
    "filter": _filter,
    "channel": _channel,
    "strip": _strip,
    "": _layer,
}
_LOCAL_OPS: dict[Kind, Callable[[OpContext], LocalOp]] = {
    "constant": _constant,
    "convolution": _convolution,
    "linear": _convolution,
    "pool": _pool,
    "resize": _pool,
    "average": _average,
    "pointwise": _call,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "concat": _concat,
    "part": _part,
    "flatten": _flatten,
    "other": _call,
}
