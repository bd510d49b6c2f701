"""Layers that look up or mix features: linear and embedding."""

from __future__ import annotations

from evener.autodiff import functional as F
from evener.autodiff.nn import init
from evener.autodiff.nn.module import Module
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors import Tensor, zeros


class Linear(Module):
    """x[..., I] weight[O, I]^T + bias[O]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(zeros(out_features, in_features))
        self.bias = Parameter(zeros(out_features)) if bias else None
        init.by_fan_in_(self.weight, in_features)
        if self.bias is not None:
            init.by_fan_in_(self.bias, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


class Embedding(Module):
    """A row of weight[num_embeddings, embedding_dim] for every index."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = Parameter(zeros(num_embeddings, embedding_dim))
        init.normal_(self.weight)

    def forward(self, index: Tensor) -> Tensor:
        """[...] of integers -> [..., embedding_dim]."""
        return F.embedding(index, self.weight)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"
