"""Layers that normalise: batch norm with running statistics, and layer norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evener.autodiff import functional as F
from evener.autodiff.errors import require
from evener.autodiff.nn.module import Module
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors import Tensor, full, ones, zeros


class BatchNorm2d(Module):
    """Normalises every channel of [N, C, H, W] over the batch; in use, by the running statistics of training."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = Parameter(ones(num_features)), Parameter(zeros(num_features))
        self.register_buffer("running_mean", zeros(num_features))
        self.register_buffer("running_var", ones(num_features))
        self.register_buffer("num_batches_tracked", full((), 0, np.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H, W]."""
        require(x.ndim == 4, "BatchNorm2d needs [N, C, H, W], got {}", x.shape)
        if self.training:
            self.num_batches_tracked.copy_(self.num_batches_tracked + 1)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )

    def extra_repr(self) -> str:
        """Size and options."""
        return f"{self.weight.shape[0]}, eps={self.eps}, momentum={self.momentum}"


class LayerNorm(Module):
    """Normalises each sample over its last dimensions, of `normalized_shape`."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.weight, self.bias = Parameter(ones(self.normalized_shape)), Parameter(zeros(self.normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape] -> the same shape."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Size and options."""
        return f"{self.normalized_shape}, eps={self.eps}"
