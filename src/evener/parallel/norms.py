"""Normalisation of divided values, on CPU and GPU (PyTorch's SyncBatchNorm refuses the CPU).

    normalise_channels   BatchNorm over the ranks of a group; backward is that of the whole batch, with two sums per
                         channel
    move                 moves running statistics towards those of a whole batch
    group_norm           GroupNorm and InstanceNorm of images whose channels or pixels are divided

N samples, C channels, p ranks, G groups of channels, S pixels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.group import Group
from evener.parallel.norm_statistics import (
    Gathers,
    Statistics,
    channel_statistics,
    combine,
    combine_channels,
    group_statistics,
    stat_dtype,
)


@torch.no_grad()
def move(running_mean: Tensor, running_var: Tensor, seen: Statistics, factor: float) -> None:
    """Move running statistics by `factor` towards the statistics `seen` (unbiased variance), unless these are empty."""
    mean, var, count = seen
    moves = (count > 0).to(running_mean.dtype)
    unbiased = var * (count / (count - 1).clamp(min=1))
    running_mean.lerp_(mean.to(running_mean.dtype), factor * moves)
    running_var.lerp_(unbiased.to(running_var.dtype), factor * moves)


def normalise_channels(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Gathers, counted: bool
) -> tuple[Tensor, Statistics]:
    """Return BatchNorm of `x` (N, C, ...) over all parts, and its statistics; this part may not be `counted`."""
    y, *seen = _NormaliseChannels.apply(x, weight, bias, eps, group, counted)  # type: ignore[no-untyped-call]
    return y, Statistics(*seen)


class _NormaliseChannels(torch.autograd.Function):
    """Maps (x, weight, bias) to normalised x and the statistics of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Gathers, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = combine_channels(group.all_gather(channel_statistics(x, counted), "statistics"))
        own = x.numel() // max(x.shape[1], 1) if counted else 0
        if own < 2 and float(count) < 2:  # reading it waits for the device
            raise ValueError(f"BatchNorm needs more than one value per channel in training, got {int(count)}")
        if x.numel() == 0:  # a strip without pixels, a rank without channels
            y = x.clone()
        else:
            y = F.batch_norm(x, mean.to(stat_dtype(x)), var.to(stat_dtype(x)), weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.group, ctx.counted, ctx.eps = group, counted, eps
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dy = grads[0].contiguous() if grads[0].stride() != x.stride() else grads[0]
        scaled, total = _local_sums(dy, x, weight, mean, invstd, ctx.eps)
        local = torch.stack((total, scaled)).to(mean.dtype)
        arrive = ctx.group.begin_all_sum(local if ctx.counted else torch.zeros_like(local), "statistics")
        dx = _scaled(dy, weight, invstd)  # while the sums are in flight
        sums = arrive()
        if ctx.counted:
            _correct(dx, x, weight, mean, invstd, sums / count)
        d_weight = scaled.to(weight.dtype) if weight is not None else None
        d_bias = total.to(weight.dtype) if weight is not None else None
        return dx, d_weight, d_bias, None, None, None


def _local_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return this rank's sums of dy * xhat (C,) and of dy (C,)."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    args = (dy, x, weight if weight is not None else torch.ones_like(mean), mean, invstd.pow(-2) - eps, mean, invstd)
    _, scaled, total = torch.ops.aten.native_batch_norm_backward(*args, False, eps, [False, True, True])
    return scaled, total


def _scaled(dy: Tensor, weight: Tensor | None, invstd: Tensor) -> Tensor:
    """Return dx for fixed statistics: w/std dy."""
    scale = invstd if weight is None else invstd * weight
    return (dy * scale.view((1, -1) + (1,) * (dy.dim() - 2))).to(dy.dtype)


def _correct(dx: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, means: Tensor) -> None:
    """Subtract the batch statistics' gradient from `dx`, in place: w/std (mean(dy) + xhat mean(dy xhat))."""
    scale = invstd if weight is None else invstd * weight
    slope = -scale * invstd * means[1]
    shift = -scale * means[0] - slope * mean
    shape = (1, -1) + (1,) * (x.dim() - 2)
    dx.addcmul_(x, slope.to(x.dtype).view(shape)).add_(shift.to(x.dtype).view(shape))


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a layer normalises by the mean and variance of the whole batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, belongs: Tensor, eps: float, group: Group
) -> Tensor:
    """Return GroupNorm (InstanceNorm) of `x` (N, c, ...) over each group's channels and pixels on all ranks of `group`.

    Args:
        x: This rank's channels and pixels.
        weight: Weight of this rank's channels, (c,).
        bias: Bias of this rank's channels, (c,).
        belongs: (c, G), float32 or float64: 1 where a channel belongs to a group.
        eps: Added to the variance.
        group: The ranks that have the other channels and pixels.
    """
    normal = cast(Tensor, _NormaliseGroups.apply(x, belongs, eps, group))  # type: ignore[no-untyped-call]
    shape = (1, -1) + (1,) * (x.dim() - 2)
    scaled = normal if weight is None else normal * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


class _NormaliseGroups(torch.autograd.Function):
    """Subtracts the mean of its group from every value, and divides by the standard deviation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, belongs: Tensor, eps: float, group: Group) -> Tensor:
        rows = x[..., None].flatten(2).to(belongs.dtype)
        parts = group.all_gather(group_statistics(rows, belongs), "statistics")
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
        rows = dy[..., None].flatten(2).to(normal.dtype)
        local = torch.stack((rows.sum(2) @ belongs, (rows * normal).sum(2) @ belongs))
        means = ctx.group.all_sum(local, "statistics") / count
        shift, slope = means @ belongs.t()
        dx = (rows - shift[:, :, None] - normal * slope[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        return dx.view_as(dy).to(dy.dtype), None, None, None
