"""BatchNorm over the samples of all ranks, whatever each one's share, on CPU and GPU.

Each rank reduces its own samples to (mean, variance, count) per channel; the parts are gathered and combined
(Chan, Golub & LeVeque 1979), which loses no digits where a sum of squares would. PyTorch's SyncBatchNorm refuses the
CPU. Backward is that of the whole batch: two sums per channel are added up.

N samples, C channels, S all pixels of a sample, p ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.group import Group


class Gathers(Protocol):
    """Gathers statistics: a Group, or the data axis of divided channels."""

    @property
    def size(self) -> int:
        """Number of parts that are gathered."""

    def all_gather(self, tensor: Tensor, kind: str, /) -> Tensor:
        """The parts' statistics, stacked."""

    def all_sum(self, tensor: Tensor, kind: str, /) -> Tensor:
        """Their sum."""


class GroupBatchNorm(nn.Module):
    """A BatchNorm whose training statistics are those of all ranks' samples; same state dict, same evaluation.

    Args:
        norm: the BatchNorm that it replaces; its parameters and buffers are taken over, not copied.
        group: the ranks, or what gathers and sums for them.
        members: those that have parts of the same samples, if samples are divided: without running statistics,
            evaluation needs theirs.
    """

    def __init__(self, norm: _BatchNorm, group: Gathers, members: Group | None = None) -> None:
        super().__init__()
        self.eps, self.momentum, self.num_features = norm.eps, norm.momentum, norm.num_features
        self.group, self.members = group, members
        self.counted = True
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.training = norm.training

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape (N, C, ...)."""
        tracked = self.running_mean is not None
        if not self.training and (tracked or self.members is None):
            return self._evaluate(x)  # no replica waits for another, each has its own number of batches
        group = self.group if self.training else self.members
        y, mean, var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, group, self.counted
        )
        if self.training:
            self._track(mean, var, count)
        return cast(Tensor, y)

    def _evaluate(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        own = self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps)

    def extra_repr(self) -> str:
        """Channels and ranks."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, ranks={self.group.size}"

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Running statistics move as in one process that saw the whole batch (unbiased variance)."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """(x, weight, bias) -> normalised x, and the statistics of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Gathers, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _combine(group.all_gather(_own_statistics(x, counted), "statistics"))
        if float(count) < 2:
            raise ValueError(f"BatchNorm needs more than one value per channel in training, got {int(count)}")
        if x.numel() == 0:  # a strip without pixels, a rank without channels
            y = x.clone()
        else:
            y = F.batch_norm(x, mean.to(_stat_dtype(x)), var.to(_stat_dtype(x)), weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.group, ctx.counted, ctx.eps = group, counted, eps
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dy = grads[0].contiguous() if grads[0].stride() != x.stride() else grads[0]
        dx, scaled, total = _own_backward(dy, x, weight, mean, invstd, ctx.eps)
        if ctx.counted:
            sums = ctx.group.all_sum(torch.stack((total, scaled)).to(mean.dtype), "statistics")
            _correct(dx, x, weight, mean, invstd, sums / count)
        else:
            ctx.group.all_sum(torch.zeros_like(torch.stack((mean, mean))), "statistics")
        d_weight = scaled.to(weight.dtype) if weight is not None else None
        d_bias = total.to(weight.dtype) if weight is not None else None
        return dx, d_weight, d_bias, None, None, None


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _own_statistics(x: Tensor, counted: bool) -> Tensor:
    """Mean, biased variance and count of this rank's samples, shape (2 C + 1,); a count of 0 if not `counted`."""
    x = x.detach().to(_stat_dtype(x))
    channels = x.shape[1]
    if x.numel() == 0:
        return x.new_zeros(2 * channels + 1)
    values = x.numel() // channels
    if x.device.type == "cpu":  # sums over whole rows vectorise; var_mean over (N, S) takes 10 times as long
        mean = _channel_sum(x) / values
        shape = (1, channels) + (1,) * (x.dim() - 2)
        var = _channel_sum((x - mean.view(shape)).square_()) / values
    else:
        var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat((mean, var, mean.new_tensor([values if counted else 0])))


def _channel_sum(x: Tensor) -> Tensor:
    """Sum of (N, C, ...) over all but the channels, shape (C,)."""
    return x.sum(0) if x.dim() == 2 else x.sum(0).flatten(1).sum(1)


def _combine(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and count (1,) of all ranks' samples, from parts of shape (p, 2 C + 1)."""
    channels = parts.shape[1] // 2
    means, variances, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, var, count


def _own_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank knows alone: dx for fixed statistics, sum of dy * xhat (C,) and sum of dy (C,)."""
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    running = (mean, invstd.pow(-2) - eps)
    w = weight if weight is not None else torch.ones_like(mean)
    return torch.ops.aten.native_batch_norm_backward(  # type: ignore[no-any-return]
        dy, x, w, *running, mean, invstd, False, eps, [True, True, True]
    )


def _correct(dx: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, means: Tensor) -> None:
    """Subtract from `dx` what the batch's own statistics take: w/std (mean(dy) + xhat mean(dy xhat)), in place."""
    scale = invstd if weight is None else invstd * weight
    slope = -scale * invstd * means[1]
    shift = -scale * means[0] - slope * mean
    shape = (1, -1) + (1,) * (x.dim() - 2)
    dx.addcmul_(x, slope.to(x.dtype).view(shape)).add_(shift.to(x.dtype).view(shape))


def synchronise_batch_norm(model: nn.Module, group: Group) -> nn.Module:
    """Replace every BatchNorm in `model`, in place, by one over all ranks; returns the model (or its replacement)."""
    if isinstance(model, _BatchNorm):
        return GroupBatchNorm(model, group)
    for name, child in model.named_children():
        setattr(model, name, synchronise_batch_norm(child, group))
    return model


def statistics_exchanges(model: nn.Module) -> tuple[int, int]:
    """(number, bytes) of the exchanges of statistics in a pass over a micro-batch, bytes to each peer.

    One forward, of mean, variance and count, and one backward, of two sums, a BatchNorm: 2 C + 1 and 2 C numbers.
    """
    norms = [m for m in model.modules() if isinstance(m, GroupBatchNorm | _BatchNorm)]
    numbers = sum(4 * _channels(norm) + 1 for norm in norms)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    return 2 * len(norms), numbers * (8 if wide else 4)


def _channels(norm: GroupBatchNorm | _BatchNorm) -> int:
    return norm.num_features


@contextmanager
def untracked(model: nn.Module) -> Iterator[None]:
    """Inside, running statistics stay as they are: for a forward pass that is computed again.

    They are given a momentum of 0 rather than taken away: PyTorch keeps them for backward, and what is computed again
    has to keep the same tensors as the first time.
    """
    norms = [m for m in model.modules() if isinstance(m, GroupBatchNorm | _BatchNorm)]
    before = [(norm.momentum, _number_of_batches(norm)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and batches is not None:
                norm.num_batches_tracked.copy_(batches)


def _number_of_batches(norm: GroupBatchNorm | _BatchNorm) -> Tensor | None:
    return norm.num_batches_tracked.clone() if norm.num_batches_tracked is not None else None


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Inside, this rank's samples count in no statistics: it has none, but has to take part in the collectives."""
    norms = [m for m in model.modules() if isinstance(m, GroupBatchNorm)]
    for norm in norms:
        norm.counted = False
    try:
        yield
    finally:
        for norm in norms:
            norm.counted = True
