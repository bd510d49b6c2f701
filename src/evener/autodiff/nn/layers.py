"""Layers with parameters, and pooling: linear, embedding, convolution, normalisation, attention; functions and losses.

Functions and losses are modules for use in Sequential.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from evener.autodiff import functional as F
from evener.autodiff.errors import require
from evener.autodiff.functional import Size, attention_weights, pair
from evener.autodiff.nn import init
from evener.autodiff.nn.module import Module
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors.creation import full, ones, zeros
from evener.autodiff.tensors.tensor import Tensor


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


class Embedding(Module):
    """A row of weight[num_embeddings, embedding_dim] for every index."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = Parameter(zeros(num_embeddings, embedding_dim))
        init.normal_(self.weight)

    def forward(self, index: Tensor) -> Tensor:
        """[...] of integers -> [..., embedding_dim]."""
        return F.embedding(index, self.weight)


class Conv2d(Module):
    """Convolution with weight[F, C / groups, kh, kw] and bias[F]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        fits = groups > 0 and in_channels % groups == 0 and out_channels % groups == 0
        require(fits, "groups must divide {} and {} channels, got {}", in_channels, out_channels, groups)
        self.stride, self.padding, self.dilation, self.groups = pair(stride), pair(padding), pair(dilation), groups
        self.weight = Parameter(zeros(out_channels, in_channels // groups, *pair(kernel_size)))
        self.bias = Parameter(zeros(out_channels)) if bias else None
        inputs = init.fan_in(self.weight)
        init.by_fan_in_(self.weight, inputs)
        if self.bias is not None:
            init.by_fan_in_(self.bias, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, F, H', W']."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MaxPool2d(Module):
    """The largest of every window."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H', W']."""
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation)


class AvgPool2d(Module):
    """The mean of every window."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H', W']."""
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


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


class MultiheadAttention(Module):
    """Vaswani et al. 2017, section 3.2.2: queries, keys and values projected, attended to by head, and projected back.

    Args:
        embed_dim: E, of queries, keys, values and the result.
        num_heads: must divide E.
        dropout: probability with which a weight is dropped in training.
        batch_first: inputs are [N, L, E] instead of [L, N, E].
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, batch_first: bool = False) -> None:
        super().__init__()
        require(embed_dim % num_heads == 0, "num_heads must divide embed_dim {}, got {}", embed_dim, num_heads)
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
        self.in_proj_weight = Parameter(zeros(3 * embed_dim, embed_dim))
        self.in_proj_bias = Parameter(zeros(3 * embed_dim))
        self.out_proj = Linear(embed_dim, embed_dim)
        init.xavier_uniform_(self.in_proj_weight)
        init.constant_(self.out_proj.bias, 0.0)  # type: ignore[arg-type]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, shaped as `query`, and the weights' mean over heads [N, L, S] if `need_weights`.

        Args:
            query: [L, N, E], or [N, L, E] if batch_first.
            key: [S, N, E] or [N, S, E].
            value: as `key`.
            need_weights: return the weights too.
            attn_mask: [L, S] or broadcasting to [N, heads, L, S]: numbers to add, or truth values, true where a query
                may NOT look (as in PyTorch, and the opposite of scaled_dot_product_attention).
        """
        q, k, v = (self._heads(x, part) for part, x in enumerate((query, key, value)))
        if attn_mask is not None and attn_mask.dtype == bool:
            attn_mask = attn_mask == False  # noqa: E712  elementwise
        weights = attention_weights(q, k, attn_mask, self.dropout if self.training else 0.0, False, None)
        heads = weights.matmul(v)  # [N, heads, L, E / heads]
        joined = heads.transpose(1, 2).flatten(2)
        result = self.out_proj(joined if self.batch_first else joined.transpose(0, 1))
        return result, weights.mean(1) if need_weights else None

    def _heads(self, x: Tensor, part: int) -> Tensor:
        """Return input number `part`, projected, [N, heads, L, E / heads]."""
        size = self.in_proj_weight.shape[1]
        rows = slice(part * size, (part + 1) * size)
        projected = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
        samples_first = projected if self.batch_first else projected.transpose(0, 1)
        n, length, _ = samples_first.shape
        return samples_first.reshape(n, length, self.num_heads, -1).transpose(1, 2)


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
