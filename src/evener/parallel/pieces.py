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
from evener.parallel.operations import At, Call, Item, filled
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.rectangle_ops import Rectangle, held_by
from evener.parallel.redistribute import mover
from evener.parallel.spatial_convolution import StripConvolution

Piece: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""From this rank's inputs, in the layouts that the plan says, to its output."""


@dataclass(frozen=True)
class Workbench:
    """What a piece is made of.

    Attributes:
        operation: to be done.
        inputs: the operations whose outputs it reads.
        step: how the plan does it.
        call: what computes it in one process.
        model: this rank's part of the model.
        place: of this rank.
        samples: (first one of this replica, number over all replicas) of the batch that is being computed.
    """

    operation: Operation
    inputs: tuple[Operation, ...]
    step: OperationPlan
    call: Call
    model: nn.Module
    place: ProcessMesh
    samples: Callable[[], tuple[int, int]]

    @property
    def rank(self) -> int:
        """Of this process in its replica."""
        return self.place.group.rank

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

    @property
    def is_image_divided(self) -> bool:
        """Whether ranks have rectangles of the output."""
        return self.gives.along(2) is not None

    def rectangles(self, reach: Layout) -> tuple[Rectangle, Rectangle]:
        """What this rank has of the input, when it comes in layout `reach`, and what of the output."""
        return held_by(reach, self.rank, self.inputs[0].shape), held_by(self.gives, self.rank, self.operation.shape)


def piece(bench: Workbench) -> Piece:
    """What this rank computes of the operation on the bench."""
    return _PIECES[bench.operation.kind](bench)


def resolved(function: Any, model: nn.Module) -> Any:
    """The function itself, with modules of `model` where it stands for some."""
    if isinstance(function, At):
        return model.get_submodule(function.path)
    if isinstance(function, Item):
        inner = resolved(function.function, model)
        return lambda *args, **kwargs: inner(*args, **kwargs)[function.index]
    return function


def _call(bench: Workbench) -> Piece:
    function = bench.layer
    if isinstance(function, nn.Dropout):
        return _dropout(bench, function)

    def call(inputs: Sequence[Tensor]) -> Tensor:
        args, kwargs = filled((bench.call.args, bench.call.kwargs), iter(inputs))
        result: Tensor = function(*args, **kwargs)
        return result

    return call


def _dropout(bench: Workbench, layer: nn.Dropout) -> Piece:
    switch = layer if isinstance(bench.call.function, At) else bench.model
    shape, region, samples = bench.operation.shape, bench.region, bench.samples
    return lambda inputs: dropout(inputs[0], layer.p, shape, region, samples()) if switch.training else inputs[0]


def _constant(bench: Workbench) -> Piece:
    find = operator.attrgetter(bench.operation.name)
    return lambda _: find(bench.model)


def _concat(bench: Workbench) -> Piece:
    return lambda inputs: torch.cat(list(inputs), bench.operation.concat_dim)


def _flatten(_: Workbench) -> Piece:
    return lambda inputs: inputs[0].flatten(1)


def _part(bench: Workbench) -> Piece:
    """A stretch of the channels that this rank has."""
    own = bench.step.choice.needs[0].region(bench.rank, bench.inputs[0].shape)[1]
    start = bench.operation.bounds[0]
    before = sum(max(0, min(b, start) - a) for a, b in own)
    width = bench.shape[1]
    return lambda inputs: inputs[0].narrow(1, before, width)


def _average(bench: Workbench) -> Piece:
    """The mean over all pixels, or this rank's addend of it."""
    need, shape = bench.step.choice.needs[0], bench.inputs[0].shape
    if need.along(2) is None:
        return lambda inputs: inputs[0].mean((2, 3), keepdim=True)
    pixels = shape[2] * shape[3]
    return lambda inputs: inputs[0].sum((2, 3), keepdim=True) / pixels


def _convolution(bench: Workbench) -> Piece:
    return _CONVOLUTIONS[bench.step.choice.mode](bench)


def _layer(bench: Workbench) -> Piece:
    layer, shape = bench.layer, bench.shape

    def run(inputs: Sequence[Tensor]) -> Tensor:
        if inputs[0].numel() == 0 and not isinstance(layer, GroupBatchNorm):
            return empty_output(shape, inputs[0], dtype=inputs[0].dtype)
        result: Tensor = layer(inputs[0])
        return result

    return run


def _filter(bench: Workbench) -> Piece:
    own = FilterParallel(bench.layer, bench.shape)
    return lambda inputs: own(inputs[0])


def _channel(bench: Workbench) -> Piece:
    adds = bench.step.choice.adds
    assert adds is not None
    own = ChannelParallel(bench.layer, adds.region(bench.rank, bench.operation.shape)[1], bench.operation.shape)
    return lambda inputs: own(inputs[0])


def _strip(bench: Workbench) -> Piece:
    choice, windows, layer = bench.step.choice, bench.operation.windows, bench.layer
    have, reach = choice.needs[0], choice.reach or choice.needs[0]
    if any(isinstance(one, Spreading) for one in windows):
        return _transposed(bench)
    strip = StripConvolution(
        bench.place.group,
        windows,  # type: ignore[arg-type]
        bench.operation.groups,
        bench.inputs[0].shape,
        have,
        reach,
        bench.gives,
        bench.operation.shape,
        bench.step.halo.kind if bench.step.halo is not None else "halo",
    )
    return lambda inputs: strip(inputs[0], layer.weight, layer.bias)


def _transposed(bench: Workbench) -> Piece:
    """A transposed convolution: gets what its windows reach before it computes."""
    halo, layer, shape = bench.step.halo, bench.layer, bench.shape
    bring = mover(halo, bench.place.group) if halo is not None else None
    held, outputs = bench.rectangles(bench.step.choice.reach or bench.step.choice.needs[0])
    windows: Any = bench.operation.windows

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = bring(inputs[0]) if bring is not None else inputs[0]
        if outputs.is_empty or held.is_empty:
            y = empty_output(shape, x, layer.weight)
            return y if layer.bias is None else torch.add(y, layer.bias.to(y.dtype).view(-1, 1, 1))
        return rectangle_ops.transposed(x, layer, windows, held, outputs)

    return run


def _pool(bench: Workbench) -> Piece:
    """Pooling or resizing of a rectangle, or of all pixels of some channels."""
    if not bench.is_image_divided:
        return _layer(bench)
    held, outputs = bench.rectangles(bench.step.choice.needs[0])
    compute = _rectangle_function(bench)
    shape = bench.shape
    if outputs.is_empty or held.is_empty:
        return lambda inputs: empty_output(shape, inputs[0], dtype=inputs[0].dtype)
    return lambda inputs: compute(inputs[0], bench.operation.windows, held, outputs)


def _rectangle_function(bench: Workbench) -> Callable[..., Tensor]:
    layer, windows = bench.layer, bench.operation.windows
    if isinstance(layer, nn.MaxPool2d):
        return lambda x, *where: rectangle_ops.max_pool(x, layer, *where)
    if isinstance(layer, nn.AvgPool2d):
        image = bench.inputs[0].shape[2:]
        return lambda x, *where: rectangle_ops.average_pool(x, layer, image, *where)
    if isinstance(layer, nn.AdaptiveMaxPool2d):
        return rectangle_ops.adaptive_maximum
    if isinstance(windows[0], Nearest):
        return rectangle_ops.nearest
    return rectangle_ops.linear if isinstance(windows[0], Linear) else rectangle_ops.adaptive_average


def _batch_norm(bench: Workbench) -> Piece:
    layer = bench.layer
    if isinstance(layer, GroupBatchNorm) or bench.shape[1]:
        return _layer(bench)

    def count_only(inputs: Sequence[Tensor]) -> Tensor:
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
        return empty_output(bench.shape, inputs[0], *layer.parameters(), dtype=inputs[0].dtype)

    return count_only


def _group_norm(bench: Workbench) -> Piece:
    if bench.gives.state != "split":
        return _layer(bench)
    layer, operation = bench.layer, bench.operation
    width = operation.shape[1] // operation.groups
    own = torch.tensor([c // width for a, b in bench.region[1] for c in range(a, b)], dtype=torch.long)
    belongs = torch.nn.functional.one_hot(own, operation.groups)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        members = belongs.to(x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return group_norm(x, layer.weight, layer.bias, members, layer.eps, bench.place.group)

    return run


_CONVOLUTIONS: dict[str, Callable[[Workbench], Piece]] = {
    "filter": _filter,
    "channel": _channel,
    "strip": _strip,
    "": _layer,
}
_PIECES: dict[Kind, Callable[[Workbench], Piece]] = {
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
