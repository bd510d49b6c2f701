"""Functions and losses as modules, for use in Sequential."""

from __future__ import annotations

from collections.abc import Callable

from evener.autodiff import functional as F
from evener.autodiff.nn.module import Module
from evener.autodiff.tensors.tensor import Tensor


class ReLU(Module):
    """The larger of x and 0."""

    forward = staticmethod(F.relu)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    forward = staticmethod(F.sigmoid)


class Tanh(Module):
    """Hyperbolic tangent."""

    forward = staticmethod(F.tanh)


class GELU(Module):
    """x times the normal distribution function of x, or the older formula with "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the input."""
        return F.gelu(x, self.approximate)


class _AlongDim(Module):
    function: Callable[[Tensor, int], Tensor]

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the input."""
        return self.function(x, self.dim)


class Softmax(_AlongDim):
    """exp(x) over its sum along `dim`."""

    function = staticmethod(F.softmax)


class LogSoftmax(_AlongDim):
    """Logarithm of the softmax along `dim`."""

    function = staticmethod(F.log_softmax)


class Dropout(Module):
    """In training: each element 0 with probability p, else divided by 1 - p."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the input."""
        return F.dropout(x, self.p, self.training)


class Flatten(Module):
    """Merges all dimensions but the first."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, product of the others]."""
        return x.flatten(1)


class _Loss(Module):
    function: Callable[[Tensor, Tensor, str], Tensor]

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss: a number, or one per sample with reduction "none"; shapes as in `functional`."""
        return self.function(outputs, target, self.reduction)


class NLLLoss(_Loss):
    """Negative log likelihood of the right classes."""

    function = staticmethod(F.nll_loss)


class CrossEntropyLoss(_Loss):
    """Negative log likelihood of the right classes under the softmax of the logits."""

    function = staticmethod(F.cross_entropy)


class MSELoss(_Loss):
    """Squared error."""

    function = staticmethod(F.mse_loss)
