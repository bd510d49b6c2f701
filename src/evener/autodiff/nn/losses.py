"""Losses as modules."""

from __future__ import annotations

from evener.autodiff import functional as F
from evener.autodiff.nn.module import Module
from evener.autodiff.tensors import Tensor


class NLLLoss(Module):
    """Negative log likelihood of the right classes."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, log_probabilities: Tensor, target: Tensor) -> Tensor:
        """[N, K, ...] and classes [N, ...] -> a number, or [N, ...]."""
        return F.nll_loss(log_probabilities, target, self.reduction)


class CrossEntropyLoss(Module):
    """Negative log likelihood of the right classes under the softmax of what is given."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """[N, K, ...] and classes [N, ...] -> a number, or [N, ...]."""
        return F.cross_entropy(logits, target, self.reduction)


class MSELoss(Module):
    """Squared error."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Two tensors of one shape -> a number, or that shape."""
        return F.mse_loss(x, target, self.reduction)
