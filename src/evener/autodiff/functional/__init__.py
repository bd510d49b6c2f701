"""Functions on tensors, with PyTorch's names: `from evener.autodiff import functional as F`."""

from evener.autodiff.functional.activations import dropout, gelu, log_softmax, relu, sigmoid, softmax, tanh
from evener.autodiff.functional.attention import scaled_dot_product_attention
from evener.autodiff.functional.images import avg_pool2d, conv2d, max_pool2d
from evener.autodiff.functional.layers import batch_norm, embedding, layer_norm, linear
from evener.autodiff.functional.losses import cross_entropy, mse_loss, nll_loss

__all__ = [
    "avg_pool2d",
    "batch_norm",
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "log_softmax",
    "max_pool2d",
    "mse_loss",
    "nll_loss",
    "relu",
    "scaled_dot_product_attention",
    "sigmoid",
    "softmax",
    "tanh",
]
