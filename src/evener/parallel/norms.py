"""Norms of values that lie in parts, on CPU and GPU (PyTorch's SyncBatchNorm refuses the CPU).

    GroupBatchNorm       the parts are on the ranks of a group; backward is that of the whole batch: two sums a channel
    DeferredBatchNorm    the parts are micro-batches, each normalised by its own statistics (Huang et al., 2019); the
                         running ones move once a step, by all that the layer saw in it
    group_norm           GroupNorm and InstanceNorm of images whose channels or pixels are divided

N samples, C channels, p ranks, G groups of channels, S pixels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
from evener.parallel.op_registry import is_plain
from evener.tracer.hooks import take_forward_hooks


class _ReplacedBatchNorm(nn.Module):
    """What stands for a BatchNorm: its parameters and buffers are taken over; same state dict, same evaluation."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum, self.num_features = norm.eps, norm.momentum, norm.num_features
        self.counting = True
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.training = norm.training
        take_forward_hooks(norm, self)

    @property
    def tracks(self) -> bool:
        """Whether it keeps running statistics."""
        return self.running_mean is not None

    @torch.no_grad()
    def move(self, seen: Statistics) -> None:
        """Move the running statistics as one process that has `seen` this (unbiased variance); if it is any."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += (seen[2][0] > 0).to(self.num_batches_tracked.dtype)
        factor = self.momentum if self.momentum is not None else 1.0 / max(1.0, float(self.num_batches_tracked))
        move(self.running_mean, self.running_var, seen, factor)

    def reset_parameters(self) -> None:
        """Initial values, as those of BatchNorm."""
        zeros = (self.bias, self.running_mean, self.num_batches_tracked)
        for tensor, value in ((self.weight, 1), (self.running_var, 1), *((zero, 0) for zero in zeros)):
            if tensor is not None:
                nn.init.constant_(tensor, value)

    def _plain(self, x: Tensor) -> Tensor:
        """Normalised by the running statistics, or, without them or in training, by those of `x` alone."""
        own = self.training or self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps)


@torch.no_grad()
def move(running_mean: Tensor, running_var: Tensor, seen: Statistics, factor: float) -> None:
    """Move running statistics by `factor` to what was seen (unbiased variance); if it is any."""
    mean, var, count = seen
    moves = (count > 0).to(running_mean.dtype)
    unbiased = var * (count / (count - 1).clamp(min=1))
    running_mean.lerp_(mean.to(running_mean.dtype), factor * moves)
    running_var.lerp_(unbiased.to(running_var.dtype), factor * moves)


class GroupBatchNorm(_ReplacedBatchNorm):
    """A BatchNorm whose training statistics are those of all ranks' samples, whatever each one's share.

    Args:
        norm: the BatchNorm that it replaces.
        group: the ranks, or what gathers and sums for them.
        members: those that have parts of the same samples, if samples are divided: without running statistics,
            evaluation needs theirs.
    """

    def __init__(self, norm: _BatchNorm, group: Gathers, members: Group | None = None) -> None:
        super().__init__(norm)
        self.group, self.members = group, members

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape (N, C, ...)."""
        if not self.training and (self.tracks or self.members is None):
            return self._plain(x) if x.numel() else x  # no replica waits for another, each has its own batches
        group = self.group if self.training else self.members
        assert group is not None
        y, seen = normalise_channels(x, self.weight, self.bias, self.eps, group, self.counting)
        if self.training:
            self.move(seen)
        return y


class DeferredBatchNorm(_ReplacedBatchNorm):
    """A BatchNorm that collects the statistics of micro-batches, of each use by itself; moves when asked to."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__(norm)
        self._parts: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._use = 0

    def begin(self, counting: bool) -> None:
        """A micro-batch begins, which counts or does not."""
        self.counting, self._use = counting, 0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape (N, C, ...)."""
        if not self.training or self.running_mean is None:
            return self._plain(x)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # sets both to those of x
        if self.counting:
            count = x.numel() // x.shape[1]
            seen = torch.stack((mean, var * ((count - 1) / count), torch.full_like(mean, count)))
            self._parts[self._use].append(seen)
            self._use += 1
        return y

    def collected(self) -> list[Statistics]:
        """Of what every use has seen since the last call, each of shape (C,); forgets it."""
        assert self.running_mean is not None
        empty = torch.zeros(3, self.num_features, dtype=self.running_mean.dtype, device=self.running_mean.device)
        found = [combine(Statistics(*torch.stack(parts or [empty]).unbind(1))) for parts in self._parts.values()]
        self.forget()
        return found

    def forget(self) -> None:
        """Drop what was collected: the step was not finished."""
        self._parts = defaultdict(list, {use: [] for use in self._parts})


def normalise_channels(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Gathers, counted: bool
) -> tuple[Tensor, Statistics]:
    """BatchNorm of `x` (N, C, ...) by the statistics of all parts, of which this one is `counted` or not; and those."""
    y, *seen = _NormaliseChannels.apply(x, weight, bias, eps, group, counted)  # type: ignore[no-untyped-call]
    return y, Statistics(*seen)


class _NormaliseChannels(torch.autograd.Function):
    """(x, weight, bias) -> normalised x, and the statistics of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Gathers, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = combine_channels(group.all_gather(channel_statistics(x, counted), "statistics"))
        if float(count) < 2:
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
        scaled, total = _own_sums(dy, x, weight, mean, invstd, ctx.eps)
        own = torch.stack((total, scaled)).to(mean.dtype)
        arrive = ctx.group.begin_all_sum(own if ctx.counted else torch.zeros_like(own), "statistics")
        dx = _scaled(dy, weight, invstd)  # while the sums travel
        sums = arrive()
        if ctx.counted:
            _correct(dx, x, weight, mean, invstd, sums / count)
        d_weight = scaled.to(weight.dtype) if weight is not None else None
        d_bias = total.to(weight.dtype) if weight is not None else None
        return dx, d_weight, d_bias, None, None, None


def _own_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What this rank knows alone: sum of dy * xhat (C,) and sum of dy (C,)."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    given = (dy, x, weight if weight is not None else torch.ones_like(mean), mean, invstd.pow(-2) - eps, mean, invstd)
    _, scaled, total = torch.ops.aten.native_batch_norm_backward(*given, False, eps, [False, True, True])
    return scaled, total


def _scaled(dy: Tensor, weight: Tensor | None, invstd: Tensor) -> Tensor:
    """dx for fixed statistics: w/std dy."""
    scale = invstd if weight is None else invstd * weight
    return (dy * scale.view((1, -1) + (1,) * (dy.dim() - 2))).to(dy.dtype)


def _correct(dx: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, means: Tensor) -> None:
    """Subtract from `dx` what the batch's own statistics take: w/std (mean(dy) + xhat mean(dy xhat)), in place."""
    scale = invstd if weight is None else invstd * weight
    slope = -scale * invstd * means[1]
    shift = -scale * means[0] - slope * mean
    shape = (1, -1) + (1,) * (x.dim() - 2)
    dx.addcmul_(x, slope.to(x.dtype).view(shape)).add_(shift.to(x.dtype).view(shape))


def _replaced(module: nn.Module, new: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    if isinstance(module, _BatchNorm) and is_plain(module):
        return new(module)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, new))
    return module


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a layer normalises what it sees by the mean and variance of the whole batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise_batch_norm(model: nn.Module, group: Gathers) -> nn.Module:
    """Replace plain BatchNorms in `model`, in place, by ones over all ranks; returns the model (or its replacement)."""
    return _replaced(model, lambda norm: GroupBatchNorm(norm, group))


def defer_statistics(module: nn.Module) -> nn.Module:
    """Replace plain BatchNorms in `module`, in place, by ones that defer; returns the module (or its replacement)."""
    return _replaced(module, DeferredBatchNorm)


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
        own = torch.stack((rows.sum(2) @ belongs, (rows * normal).sum(2) @ belongs))
        means = ctx.group.all_sum(own, "statistics") / count
        shift, slope = means @ belongs.t()
        dx = (rows - shift[:, :, None] - normal * slope[:, :, None]) * (invstd @ belongs.t())[:, :, None]
        return dx.view_as(dy).to(dy.dtype), None, None, None
