"""Functions with weights: linear layers, embedding, normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from evener.autodiff.errors import require
from evener.autodiff.gradient_mode import no_grad
from evener.autodiff.rules.normalisation import Axes, Running
from evener.autodiff.tensors import Tensor, apply
from evener.autodiff.tensors.promotion import require_floats


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
