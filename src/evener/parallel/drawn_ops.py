"""Operations that draw random numbers. They draw the numbers of a single process, for the samples of all replicas.

    dropout           draws a mask for the whole value, of which a rank uses its part
    of_all_samples    runs any other operation on as many samples as a single process has, and uses this rank's samples

The number and order of an operation's draws are unknown, so it gets inputs of a single process's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.oracle.division.layout import Shape
from evener.parallel.op_call import OpGraph
from evener.parallel.op_context import LocalOp, OpContext
from evener.parallel.redistribute import part_of
from evener.records.errors import InvalidInput
from evener.tracer.nested import map_tensors


def dropout(ctx: OpContext, layer: nn.Dropout) -> LocalOp:
    """Return dropout with the mask of a single process, which draws it for the samples of all replicas."""
    shape, region = ctx.operation.shape, ctx.region

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        if not layer.training:
            return x
        first, count, total = ctx.samples()
        whole = ctx.graph.of_samples(total).network.operations[ctx.index].shape if count != total else shape
        mask = F.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), layer.p)
        mask = part_of(_samples_from(mask, shape, first if count else 0, total), region)
        return x * mask.clone()  # a view would keep the whole mask alive

    return run


def of_all_samples(ctx: OpContext) -> LocalOp:
    """Return the operation's result for this replica's samples, computed for the samples of all replicas."""
    alone, made = ctx.computing(ctx.call), ctx.call.shapes

    def run(inputs: Sequence[Tensor]) -> Tensor:
        first, count, total = ctx.samples()
        if count == total:
            return alone(inputs)
        start, graph = first if count else 0, ctx.graph.of_samples(total)
        needed = _shapes_read(graph, ctx.index)
        among = [_among_all(x, shape, start, total) for x, shape in zip(inputs, needed, strict=True)]
        results = ctx.computing(graph.calls[ctx.index])(among)
        shapes: Iterator[Shape] = iter(made)
        samples: Tensor = map_tensors(results, lambda tensor: _samples_from(tensor, next(shapes), start, total))
        return samples

    return run


def refuse_own_draws(graph: OpGraph, samples: int, training: bool) -> None:
    """Raise InvalidInput if replicas cannot draw the numbers of a single process, for a graph of `samples` samples."""
    drawn = [index for index, call in enumerate(graph.calls) if call.is_random]
    if not drawn:
        return
    place = graph.calls[drawn[0]].line or graph.network.operations[drawn[0]].name
    if not training:
        raise InvalidInput(
            f"the model also draws random numbers in evaluation ({place}), where replicas are independent"
        )
    more = graph.of_samples(samples + 1)
    if [one.name for one in more.network.operations] != [one.name for one in graph.network.operations]:
        raise InvalidInput(f"the random operations ({place}) depend on the number of samples, which replicas divide")
    for index in drawn:
        shapes = (*_shapes_read(graph, index), *graph.calls[index].shapes)
        others = (*_shapes_read(more, index), *more.calls[index].shapes)
        grows = all(_grows(a, b, samples) for a, b in zip(shapes, others, strict=True))
        if not grows or graph.network.operations[index].kind == "whole":
            raise InvalidInput(
                f"it is unknown which random numbers of {graph.network.operations[index].name} belong to which sample "
                f"({graph.calls[index].line or 'in a module'}): replicas cannot divide the samples"
            )


def _shapes_read(graph: OpGraph, index: int) -> list[Shape]:
    operations = graph.network.operations
    return [operations[i].shape for i in operations[index].inputs]


def _grows(shape: Shape, longer: Shape, samples: int) -> bool:
    """Return whether one more sample makes a value longer by one sample along a single dim, or not at all."""
    dims = [dim for dim, (a, b) in enumerate(zip(shape, longer, strict=True)) if a != b]
    return not dims or (len(dims) == 1 and shape[dims[0]] == samples * (longer[dims[0]] - shape[dims[0]]))


def _samples_from(x: Tensor, shape: Shape, first: int, total: int) -> Tensor:
    """Return the samples from `first` on, as many as `shape` has, of a value of all samples."""
    for dim, (whole, count) in enumerate(zip(x.shape, shape, strict=True)):
        if whole != count:
            return x.narrow(dim, first * (whole // total), count)
    return x


def _among_all(x: Tensor, shape: Shape, first: int, total: int) -> Tensor:
    """Return `x` as the samples from `first` on of a value of all samples; copies of its first sample fill the rest."""
    for dim, (count, whole) in enumerate(zip(x.shape, shape, strict=True)):
        if count != whole:
            each = whole // total
            another = x.detach().narrow(dim, 0, each)
            before, after = first, total - first - count // each
            return torch.cat([*[another] * before, x, *[another] * after], dim)
    return x
