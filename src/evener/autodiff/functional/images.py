"""Convolution and pooling of images [N, C, H, W]."""

from __future__ import annotations

from functools import lru_cache

from evener.autodiff.backends.window import Pair, Window
from evener.autodiff.errors import require
from evener.autodiff.tensors import Tensor, apply
from evener.autodiff.tensors.promotion import require_floats

Size = int | tuple[int, int]


def pair(size: Size) -> tuple[int, int]:
    """One number for both image dimensions, or one for each."""
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
    """A window that was checked to fit images of rows and columns `image`."""
    window = Window(kernel, stride, padding, dilation)
    positive = min(*kernel, *stride, *dilation) >= 1 and min(padding) >= 0
    require(positive, "kernel, stride and dilation must be at least 1, padding at least 0, got {}", window)
    fits = min(window.results(*image)) >= 1
    require(fits, "a window over {} does not fit an image {} padded by {}", window.reach, image, padding)
    return window
