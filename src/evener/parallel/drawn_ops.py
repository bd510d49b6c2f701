"""Operations that draw random numbers: they are those of one process, which draws for the samples of all replicas.

    dropout           a mask for the whole value, of which a rank uses its part
    of_all_samples    any other operation, run on as many samples as one process has, of which only the own ones count

How many numbers an operation draws, and in which order, is its own affair: so it is given the shapes of one process.
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
    """Drops what one process would, which draws a mask for the samples of all replicas."""
    shape, region = ctx.operation.shape, ctx.region

    def run(inputs: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        if not layer.training:
            return x
        first, own, total = ctx.samples()
        whole = ctx.graph.of_samples(total).network.operations[ctx.index].shape if own != total else shape
        mask = F.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), layer.p)
        return x * part_of(_own(mask, shape, first if own else 0, total), region).clone()  # a view would keep all of it

    return run


def of_all_samples(ctx: OpContext) -> LocalOp:
    """What the operation gives for the own samples where it is done for those of all replicas."""
    alone, made = ctx.computing(ctx.call), ctx.call.shapes

    def run(inputs: Sequence[Tensor]) -> Tensor:
        first, own, total = ctx.samples()
        if own == total:
            return alone(inputs)
        start, graph = first if own else 0, ctx.graph.of_samples(total)
        needed = _shapes_read(graph, ctx.index)
        among = [_among_all(x, shape, start, total) for x, shape in zip(inputs, needed, strict=True)]
        results = ctx.computing(graph.calls[ctx.index])(among)
        shapes: Iterator[Shape] = iter(made)
        found: Tensor = map_tensors(results, lambda tensor: _own(tensor, next(shapes), start, total))
        return found

    return run


def refuse_own_draws(graph: OpGraph, samples: int, training: bool) -> None:
    """Raise InvalidInput where replicas cannot draw what one process does, of a graph for so many `samples`."""
    drawn = [index for index, call in enumerate(graph.calls) if call.is_random]
    if not drawn:
        return
    place = graph.calls[drawn[0]].line or graph.network.operations[drawn[0]].name
    if not training:
        raise InvalidInput(f"random numbers are drawn in evaluation, too ({place}), which replicas do by themselves")
    more = graph.of_samples(samples + 1)
    if [one.name for one in more.network.operations] != [one.name for one in graph.network.operations]:
        raise InvalidInput(f"how the model draws ({place}) depends on the number of samples, which replicas share")
    for index in drawn:
        shapes = (*_shapes_read(graph, index), *graph.calls[index].shapes)
        others = (*_shapes_read(more, index), *more.calls[index].shapes)
        grows = all(_grows(a, b, samples) for a, b in zip(shapes, others, strict=True))
        if not grows or graph.network.operations[index].kind == "whole":
            raise InvalidInput(
                f"nobody knows which random numbers of {graph.network.operations[index].name} belong to which sample "
                f"({graph.calls[index].line or 'in a module'}): replicas cannot share the samples"
            )


def _shapes_read(graph: OpGraph, index: int) -> list[Shape]:
    operations = graph.network.operations
    return [operations[i].shape for i in operations[index].inputs]


def _grows(shape: Shape, longer: Shape, samples: int) -> bool:
    """Whether a value of one more sample is longer by this in one dim, where each sample is a stretch, or in none."""
    dims = [dim for dim, (a, b) in enumerate(zip(shape, longer, strict=True)) if a != b]
    return not dims or (len(dims) == 1 and shape[dims[0]] == samples * (longer[dims[0]] - shape[dims[0]]))


def _own(x: Tensor, shape: Shape, first: int, total: int) -> Tensor:
    """The samples from `first` on of a value of all, as many as `shape` has."""
    for dim, (whole, own) in enumerate(zip(x.shape, shape, strict=True)):
        if whole != own:
            return x.narrow(dim, first * (whole // total), own)
    return x


def _among_all(x: Tensor, shape: Shape, first: int, total: int) -> Tensor:
    """`x` as the samples from `first` on of a value of all; a copy of its first one stands for every other."""
    for dim, (own, whole) in enumerate(zip(x.shape, shape, strict=True)):
        if own != whole:
            each = whole // total
            another = x.detach().narrow(dim, 0, each)
            before, after = first, total - first - own // each
            return torch.cat([*[another] * before, x, *[another] * after], dim)
    return x
