"""Rows of all ranks' tensors together, for losses between samples; differentiable, with as many rows a rank as it has.

With L_r the loss of rank r, which counts w_r times, the gradient of the sum with respect to rank s's rows x_s is
sum over r of w_r dL_r/dx_s; as what comes of it on rank s counts w_s times later on, it is divided by that here.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.group import Group
from evener.records.errors import InvalidInput


def gather_rows(x: Tensor, group: Group, weight: float) -> Tensor:
    """The rows of every rank's `x`, in the order of ranks; a rank that counts nothing has none.

    Args:
        x: (rows, ...), the same on all ranks but for the number of rows.
        group: the ranks, all of which call this.
        weight: how often what this rank computes counts.

    Raises:
        InvalidInput: `x` has no rows, or they have other shapes on another rank.
    """
    if x.dim() == 0:
        raise InvalidInput("gather needs a tensor with rows; of a single number take run.mean or run.sum")
    own = x if weight else x[:0]
    described = np.asarray([len(own), weight, own[:1].numel() if len(own) else -1], dtype=np.float64).tobytes()
    table = np.stack([np.frombuffer(row) for row in group.all_gather_bytes(described, "evener.gather")])
    if len({size for size in table[:, 2] if size >= 0}) > 1:
        raise InvalidInput("gather needs rows of one shape on all nodes")
    sizes = [int(size) for size in table[:, 0]]
    function: Any = _GatherRows
    return cast(Tensor, function.apply(own, group, sizes, weight))


class _GatherRows(torch.autograd.Function):
    """(own rows) -> everybody's rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group, sizes: list[int], weight: float) -> Tensor:
        ctx.group, ctx.sizes, ctx.weight = group, sizes, weight
        padded = own.new_zeros((max(sizes), *own.shape[1:]))
        padded[: len(own)] = own
        return torch.cat([rows[:size] for rows, size in zip(group.all_gather(padded, "rows"), sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes = ctx.group, ctx.sizes
        total = group.all_reduce((grad * ctx.weight).contiguous(), "rows")
        begin = sum(sizes[: group.rank])
        own = total[begin : begin + sizes[group.rank]]
        return own / ctx.weight if ctx.weight else own, None, None, None
