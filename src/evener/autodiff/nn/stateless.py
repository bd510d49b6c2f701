"""Functions and losses as modules, for use in Sequential."""

from __future__ import annotations

from evener.autodiff import functional as F
from evener.autodiff.nn.module import Module
from evener.autodiff.tensors import Tensor


class ReLU(Module):
    """The larger of x and 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.relu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.tanh(x)


class GELU(Module):
    """x times the normal distribution function of x, or the older formula with "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        """Formula."""
        return f"approximate={self.approximate!r}"


class Softmax(Module):
    """exp(x) over its sum along `dim`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.softmax(x, self.dim)


class LogSoftmax(Module):
    """Logarithm of the softmax along `dim`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.log_softmax(x, self.dim)


class Dropout(Module):
    """In training: each element 0 with probability p, else divided by 1 - p."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        """Probability."""
        return f"p={self.p}"


class Flatten(Module):
    """All dimensions but the first as one."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, product of the others]."""
        return x.flatten(1)


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
