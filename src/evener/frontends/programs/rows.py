"""A differentiable all-gather of rows, for losses between samples; ranks may have different numbers of rows.

With the loss L_r of rank r and its weight w_r, the gradient of the sum with respect to rank s's rows x_s is
sum over r of w_r dL_r/dx_s. Rank s weighs its gradients by w_s later, so they are divided by w_s here.
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
    """Return the rows of every rank's `x`, in the order of ranks; a rank with weight zero has none.

    Args:
        x: (rows, ...), of one shape on all ranks except for the number of rows.
        group: the ranks, all of which call this.
        weight: of this rank's loss.

    Raises:
        InvalidInput: `x` is a scalar, or rows have different shapes on another rank.
    """
    if x.dim() == 0:
        raise InvalidInput("gather needs a tensor with rows; of a single number take run.mean or run.sum")
    rows = x if weight else x[:0]
    described = np.asarray([len(rows), weight, rows[:1].numel() if len(rows) else -1], dtype=np.float64).tobytes()
    table = np.stack([np.frombuffer(one) for one in group.all_gather_bytes(described, "evener.gather")])
    if len({size for size in table[:, 2] if size >= 0}) > 1:
        raise InvalidInput("gather needs rows of one shape on all nodes")
    sizes = [int(size) for size in table[:, 0]]
    function: Any = _GatherRows
    return cast(Tensor, function.apply(rows, group, sizes, weight))


class _GatherRows(torch.autograd.Function):
    """(local rows) -> rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group, sizes: list[int], weight: float) -> Tensor:
        ctx.group, ctx.sizes, ctx.weight = group, sizes, weight
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: len(local)] = local
        return torch.cat([rows[:size] for rows, size in zip(group.all_gather(padded, "rows"), sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes = ctx.group, ctx.sizes
        total = group.all_reduce((grad * ctx.weight).contiguous(), "rows")
        begin = sum(sizes[: group.rank])
        local = total[begin : begin + sizes[group.rank]]
        return local / ctx.weight if ctx.weight else local, None, None, None
