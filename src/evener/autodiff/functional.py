"""Functions on tensors, with PyTorch's names: `from evener.autodiff import functional as F`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod, sqrt

import numpy as np

from evener.autodiff.backends.interface import Pair, Window
from evener.autodiff.errors import require
from evener.autodiff.graph import no_grad
from evener.autodiff.rules.layers import Axes, Running
from evener.autodiff.tensors.base import require_floats
from evener.autodiff.tensors.creation import generator, where
from evener.autodiff.tensors.tensor import Tensor, apply

Size = int | tuple[int, int]


def relu(x: Tensor) -> Tensor:
    """The larger of x and 0."""
    return apply("relu", (x,))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.sigmoid()


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return x.tanh()


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x; `approximate` "tanh" for the older formula."""
    require(approximate in ("none", "tanh"), "approximate must be 'none' or 'tanh', got {!r}", approximate)
    return apply("gelu" if approximate == "none" else "gelu_tanh", (x._floating(),))


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) over its sum along `dim`."""
    return x.softmax(dim)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """Logarithm of the softmax along `dim`."""
    return x.log_softmax(dim)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """In training: each element 0 with probability p, else divided by 1 - p, so that the mean stays."""
    require(0 <= p <= 1, "p must be from 0 to 1, got {}", p)
    return apply("dropout", (x,), p, generator()) if training and p > 0 else x


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query key^T * scale + mask) value; Vaswani et al. 2017, equation 1.

    Args:
        query: [..., L, E].
        key: [..., S, E].
        value: [..., S, V].
        attn_mask: [..., L, S]: truth values (true where a query may look), or numbers to add.
        dropout_p: probability with which a weight is dropped.
        is_causal: query i sees keys up to i only; instead of `attn_mask`.
        scale: 1 / sqrt(E) unless given.
    """
    return attention_weights(query, key, attn_mask, dropout_p, is_causal, scale).matmul(value)


def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the attention weights [..., L, S]; the arguments are those of `scaled_dot_product_attention`."""
    require(not (is_causal and attn_mask is not None), "give either attn_mask or is_causal, not both")
    if is_causal:
        attn_mask = query._made(query._lease.backend.from_numpy(np.tri(query.shape[-2], key.shape[-2], dtype=bool)))
    scores = (query * (1 / sqrt(query.shape[-1]) if scale is None else scale)).matmul(key.mT)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask)
    return dropout(scores.softmax(-1), dropout_p)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return where(mask, scores, scores._number(-inf)) if mask.dtype == bool else scores + mask


def pair(size: Size) -> tuple[int, int]:
    """Return a pair from one number for both image dimensions, or one for each."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """x[N, C, H, W] convolved with weight[F, C / groups, kh, kw], plus bias[F]: [N, F, H', W']."""
    require(x.ndim == 4 and weight.ndim == 4, "conv2d needs [N, C, H, W] and [F, C, kh, kw], got {}", x.shape)
    filters, channels, *kernel = weight.shape
    fits = x.shape[1] == channels * groups and filters % groups == 0
    require(
        fits, "conv2d in {} groups cannot take {} channels to weights of shape {}", groups, x.shape[1], weight.shape
    )
    require_floats("conv2d", x, weight)
    window = _window((kernel[0], kernel[1]), pair(stride), pair(padding), pair(dilation), x.shape[2:])
    return apply("conv2d", (x, weight, bias), window, groups)


def max_pool2d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1
) -> Tensor:
    """The largest of every window; `stride` is the kernel's size unless given."""
    window = _pooling(x, kernel_size, stride, padding, dilation)
    return apply("max_pool2d", (x,), window)


def avg_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """The mean of every window, zeros of the padding included; `stride` is the kernel's size unless given."""
    return apply("avg_pool2d", (x,), _pooling(x, kernel_size, stride, padding, 1))


def _pooling(x: Tensor, kernel: Size, stride: Size | None, padding: Size, dilation: Size) -> Window:
    require(x.ndim == 4, "pooling needs [N, C, H, W], got {}", x.shape)
    step = pair(kernel if stride is None else stride)
    window = _window(pair(kernel), step, pair(padding), pair(dilation), x.shape[2:])
    half = 2 * window.padding[0] <= window.kernel[0] and 2 * window.padding[1] <= window.kernel[1]
    require(half, "the padding of a pooling is at most half its kernel, got {} for {}", window.padding, window.kernel)
    return window


@lru_cache(maxsize=1024)
def _window(kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, image: tuple[int, ...]) -> Window:
    """Return a window after checking that it fits images of rows and columns `image`."""
    window = Window(kernel, stride, padding, dilation)
    positive = min(*kernel, *stride, *dilation) >= 1 and min(padding) >= 0
    require(positive, "kernel, stride and dilation must be at least 1, padding at least 0, got {}", window)
    fits = min(window.results(*image)) >= 1
    require(fits, "a window over {} does not fit an image {} padded by {}", window.reach, image, padding)
    return window


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[..., I] weight[O, I]^T + bias[O]."""
    fits = x._array.shape[-1:] == weight._array.shape[1:]
    require(fits, "linear needs {} features in the last dimension, got a tensor of shape {}", weight.shape[-1], x.shape)
    require_floats("linear", x, weight)
    return apply("linear", (x, weight, bias))


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight[num_embeddings, D] at `index` of any shape."""
    require(index.dtype.kind in "iu", "embedding needs an index of integers, got {}", index.dtype)
    return apply("embedding", (index, weight))


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, statistics over the last dimensions, of `normalized_shape`."""
    wanted, lead = tuple(normalized_shape), x.ndim - len(normalized_shape)
    require(lead >= 0 and x.shape[lead:] == wanted, "layer_norm needs a shape that ends in {}, got {}", wanted, x.shape)
    return apply("normalise", (x, weight, bias), Axes(tuple(range(lead, x.ndim)), tuple(range(lead))), eps, None)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias for each channel, dimension 1.

    In training, mean and (biased) variance are the batch's, and the running statistics move towards them by `momentum`
    (with the unbiased variance); otherwise they are the running ones.
    """
    require(x.ndim >= 2, "batch_norm needs shape [N, C, ...], got {}", x.shape)
    axes = (0, *range(2, x.ndim))
    if training:
        require(x.numel() > x.shape[1], "batch_norm needs more than one value a channel to train on, got {}", x.shape)
        running = None
        if running_mean is not None and running_var is not None:
            running = Running(running_mean._usable(), running_var._usable(), momentum)
        return apply("normalise", (x, weight, bias), Axes(axes, axes), eps, running)
    require(running_mean is not None and running_var is not None, "batch_norm without training needs statistics")
    return _fixed_norm(x, running_mean, running_var, weight, bias, eps)  # type: ignore[arg-type]


def _fixed_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    with no_grad():
        inverse = 1 / (variance + eps).sqrt()
    scale = inverse if weight is None else weight * inverse
    y = (x - mean.reshape(shape)) * scale.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def nll_loss(log_probabilities: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """-log_probabilities[n, target[n]]: negative log likelihood of the right classes.

    Args:
        log_probabilities: [N, K] or [N, K, d1, ...].
        target: classes from 0 to K - 1, [N] or [N, d1, ...].
        reduction: "mean", "sum", or "none" for each sample's.

    Raises:
        InvalidOperation: shapes do not go together, or a class is outside 0..K-1.
    """
    scores, classes = log_probabilities.shape, target.shape
    fits = len(scores) >= 2 and classes == (scores[0], *scores[2:]) and target.dtype.kind in "iu"
    require(fits, "scores of shape {} need integer classes of that shape without dimension 1, got {} of {}",
            scores, target.dtype, classes)  # fmt: skip
    if len(scores) > 2:
        rows = log_probabilities.permute(0, *range(2, len(scores)), 1).reshape(-1, scores[1])
        return nll_loss(rows, target.reshape(-1), reduction).reshape(classes if reduction == "none" else ())
    return apply("nll", (log_probabilities,), target._usable(), _share(reduction, scores[0]))


def cross_entropy(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log likelihood of softmax(logits) along dimension 1; arguments as for `nll_loss`."""
    return nll_loss(logits.log_softmax(1), target, reduction)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """(x - target)^2.

    Args:
        x: of any shape.
        target: of the same shape.
        reduction: "mean", "sum", or "none" for each element's.

    Raises:
        InvalidOperation: the shapes differ.
    """
    require(x.shape == target.shape, "mse_loss needs equal shapes, got {} and {}", x.shape, target.shape)
    return x._with("mse", target, _share(reduction, prod(x.shape)))


def _share(reduction: str, count: int) -> float | None:
    """Return the factor of the sum over `count` losses; None where they are not summed."""
    require(reduction in ("mean", "sum", "none"), "reduction must be 'mean', 'sum' or 'none', got {!r}", reduction)
    if reduction == "none":
        return None
    return 1.0 if reduction == "sum" else 1 / count if count else float("nan")
