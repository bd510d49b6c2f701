"""GroupNorm (and InstanceNorm) of an image whose channels, rows or columns are divided among ranks.

N samples, c own channels, S own pixels, G groups of channels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evener.comm.group import Group
from evener.parallel.norm_statistics import Statistics, combine


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, belongs: Tensor, eps: float, group: Group
) -> Tensor:
    """GroupNorm (InstanceNorm) of `x` (N, c, ...) over each group's channels and pixels on all ranks of `group`.

    Args:
        x: own channels and pixels.
        weight: of the own channels, (c,).
        bias: likewise.
        belongs: (c, G), of float32 or float64: 1 where a channel belongs to a group.
        eps: added to the variance.
        group: the ranks that have the rest.
    """
    normal = cast(Tensor, _NormaliseGroups.apply(x, belongs, eps, group))  # type: ignore[no-untyped-call]
    shape = (1, -1) + (1,) * (x.dim() - 2)
    scaled = normal if weight is None else normal * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


class _NormaliseGroups(torch.autograd.Function):
    """x -> x less the mean of its group, over the standard deviation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, belongs: Tensor, eps: float, group: Group) -> Tensor:
        rows = x.flatten(2).to(belongs.dtype)
        parts = group.all_gather(_group_statistics(rows, belongs), "statistics")
        mean, var, count = combine(Statistics(*parts.unbind(1)))
        invstd = torch.rsqrt(var + eps)
        normal = (rows - (mean @ belongs.t())[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        ctx.save_for_backward(normal, belongs, invstd, count)
        ctx.group = group
        return normal.view_as(x).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normal, belongs, invstd, count = ctx.saved_tensors
        rows = dy.flatten(2).to(normal.dtype)
        own = torch.stack((rows.sum(2) @ belongs, (rows * normal).sum(2) @ belongs))
        means = ctx.group.all_sum(own, "statistics") / count
        shift, slope = means @ belongs.t()
        dx = (rows - shift[:, :, None] - normal * slope[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        return dx.view_as(dy).to(dy.dtype), None, None, None


def _group_statistics(rows: Tensor, belongs: Tensor) -> Tensor:
    """Mean, biased variance and count (3, N, G) of the groups in `rows` (N, c, S); zeros for groups not there.

    Args:
        rows: N samples of c channels of S pixels.
        belongs: (c, G), 1 where a channel belongs to a group.
    """
    count = (belongs.sum(0) * rows.shape[2]).expand(len(rows), -1)
    divisor = count.clamp(min=1)
    mean = (rows.sum(2) @ belongs) / divisor
    centred = rows - (mean @ belongs.t())[:, :, None]
    return torch.stack((mean, (centred.square().sum(2) @ belongs) / divisor, count))
