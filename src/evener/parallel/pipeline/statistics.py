"""BatchNorm over micro-batches: each is normalised by its own statistics, the running ones follow the whole batch.

Huang et al. (2019) normalise micro-batches by themselves in training. What evaluation uses moves once a step, by the
mean and the unbiased variance of all values that the layer saw in it, as in a process that takes the batch at once:
parts are combined exactly (Chan, Golub & LeVeque 1979). Recomputed micro-batches do not count a second time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class DeferredBatchNorm(nn.Module):
    """A BatchNorm that collects statistics of micro-batches and moves its running ones when told to.

    Same state dict and same evaluation as the BatchNorm that it stands for.

    Args:
        norm: parameters and buffers are taken over, not copied.

    Attributes:
        counting: whether statistics are collected; off while a micro-batch is recomputed.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum, self.num_features = norm.eps, norm.momentum, norm.num_features
        self.counting = True
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.training = norm.training
        self._parts: list[Tensor] = []

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    @property
    def tracks(self) -> bool:
        """Whether it keeps running statistics."""
        return self.running_mean is not None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape (N, C, ...)."""
        if not self.training or self.running_mean is None:
            own = self.training or self.running_mean is None
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)  # sets both to those of x
        if self.counting:
            count = x.numel() // x.shape[1]
            self._parts.append(torch.stack((mean, var * ((count - 1) / count), torch.full_like(mean, count))))
        return y

    def collected(self) -> Tensor:
        """Mean, biased variance and count of what was seen since the last call, shape (3, C); forgets it."""
        assert self.running_mean is not None
        empty = torch.zeros(3, self.num_features, dtype=self.running_mean.dtype, device=self.running_mean.device)
        parts, self._parts = torch.stack(self._parts or [empty]), []
        return combine(parts)

    def forget(self) -> None:
        """Drop what was collected: the step was not finished."""
        self._parts = []

    @torch.no_grad()
    def move(self, seen: Tensor) -> None:
        """Move the running statistics by what `collected` returned; nothing seen moves nothing."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        mean, var, count = seen
        moves = (count > 0).to(mean.dtype)
        self.num_batches_tracked += (count[0] > 0).to(self.num_batches_tracked.dtype)
        factor = self.momentum if self.momentum is not None else 1.0 / max(1.0, float(self.num_batches_tracked))
        self.running_mean.lerp_(mean, factor * moves)
        self.running_var.lerp_(var * (count / (count - 1).clamp(min=1)), factor * moves)

    def reset_parameters(self) -> None:
        """Initial values, as those of BatchNorm."""
        for tensor, value in ((self.weight, 1), (self.bias, 0), (self.running_mean, 0), (self.running_var, 1)):
            if tensor is not None:
                nn.init.constant_(tensor, value)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        """Channels."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


def combine(parts: Tensor) -> Tensor:
    """Mean, biased variance and count (3, C) of several parts, from a stack of theirs (p, 3, C)."""
    means, variances, counts = parts.unbind(1)
    count = counts.sum(0).clamp(min=1)
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return torch.stack((mean, var, counts.sum(0)))


def defer_statistics(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm in `module`, in place, by one that defers; returns the module (or its replacement)."""
    if isinstance(module, _BatchNorm):
        return DeferredBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, defer_statistics(child))
    return module
