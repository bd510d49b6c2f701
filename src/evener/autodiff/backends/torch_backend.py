"""The second back end: PyTorch's tensors, including GPUs. Only this file and the tests import PyTorch.

    set_default_backend(TorchBackend(device))

PyTorch is used for its arithmetic only, not for its differentiation.
"""

# ruff: noqa: D102  the interface documents each primitive

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from evener.autodiff.backends.interface import (
    Array,
    Backend,
    Shape,
    Window,
    binary,
    broadcast_shape,
    names_once,
    unary,
)

_NATIVE = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
}
_NUMPY = {native: dtype for dtype, native in _NATIVE.items()}


def _maximum(a: Array, b: Any, out: Array) -> Array:
    return torch.maximum(a, b, out=out) if isinstance(b, torch.Tensor) else torch.clamp(a, min=b, out=out)


class TorchBackend(Backend):
    """Arrays are `torch.Tensor` on one device.

    Args:
        device: as PyTorch names it.
    """

    name = "torch"
    block = 0
    failures = (RuntimeError, ValueError, IndexError, TypeError)
    comparisons = {"==": torch.eq, "!=": torch.ne, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge}

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)

    # Memory.

    def empty(self, shape: Shape, dtype: Any) -> Array:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def allocate(self, num_bytes: int) -> Array:
        raw = torch.empty(num_bytes + 64, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % 64
        return raw[start : start + num_bytes]

    def carve(self, buffer: Array, offset: int, shape: Shape, dtype: Any) -> Array:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return buffer[offset : offset + num_bytes].view(dtype).view(shape)

    def native(self, dtype: np.dtype[Any]) -> Any:
        return _NATIVE[dtype]

    def numpy_type(self, dtype: Any) -> np.dtype[Any]:
        return _NUMPY[dtype]

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Array:
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(self.device)

    def to_numpy(self, array: Array) -> np.ndarray[Any, Any]:
        return array.cpu().numpy()  # type: ignore[no-any-return]

    def copy(self, source: Array, out: Array) -> Array:
        return out.copy_(source)

    def fill(self, out: Array, value: float) -> Array:
        return out.fill_(value)

    # Elementwise.

    add, subtract, multiply, divide = binary(torch.add), binary(torch.sub), binary(torch.mul), binary(torch.div)
    power, maximum = binary(torch.pow), binary(_maximum)
    negative, absolute, sign = unary(torch.neg), unary(torch.abs), unary(torch.sign)
    exp, log, sqrt, tanh = unary(torch.exp), unary(torch.log), unary(torch.sqrt), unary(torch.tanh)
    sigmoid, normal_cdf = unary(torch.sigmoid), unary(torch.special.ndtr)

    def select(self, condition: Array, a: Array, b: Array) -> Array:
        shape = broadcast_shape(broadcast_shape(a.shape, b.shape), condition.shape)
        return torch.where(condition, a, b, out=self.new(shape, a.dtype))

    def keep(self, a: Array, condition: Array, out: Array | None = None) -> Array:
        out = self.new(a.shape, a.dtype) if out is None else out
        return torch.where(condition, a, a.new_zeros(()), out=out)

    # Reductions.

    def sum(self, a: Array, axes: Shape, keepdims: bool, out: Array | None = None) -> Array:
        if not axes:  # torch.sum over no dimensions would sum over all
            return self.copy(a, self.new(a.shape, a.dtype) if out is None else out)
        return torch.sum(a, axes, keepdim=keepdims) if out is None else torch.sum(a, axes, keepdim=keepdims, out=out)

    def max(self, a: Array, axes: Shape, keepdims: bool) -> Array:
        return torch.amax(a, axes, keepdim=keepdims) if axes else a

    def argmax(self, a: Array, axis: int, keepdims: bool) -> Array:
        return torch.argmax(a, axis, keepdim=keepdims)

    # Shapes.

    def reshape(self, a: Array, shape: Shape) -> Array:
        return a.reshape(shape)

    def transpose(self, a: Array, axes: Shape) -> Array:
        return a.permute(axes)

    def broadcast(self, a: Array, shape: Shape) -> Array:
        return a.expand(shape)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        return torch.cat(list(arrays), axis)

    def take(self, a: Array, index: Any) -> Array:
        return a[index]

    def put_add(self, shape: Shape, index: Any, values: Array, out: Array | None = None) -> Array:
        out = self.zeros(tuple(shape), values.dtype) if out is None else self.fill(out, 0)
        if names_once(index):
            out[index] = values
            return out
        places = torch.arange(out.numel(), device=self.device).reshape(shape)[index]
        out.view(-1).index_add_(0, places.reshape(-1), values.reshape(-1))
        return out

    def take_along(self, a: Array, index: Array, axis: int) -> Array:
        return torch.take_along_dim(a, index, axis)

    def put_along(self, shape: Shape, index: Array, values: Array, axis: int) -> Array:
        return self.zeros(tuple(shape), values.dtype).scatter_add_(axis, index, values)

    def take_rows(self, table: Array, index: Array) -> Array:
        return F.embedding(index, table)

    def pick(self, a: Array, index: Array) -> Array:
        return a.gather(1, index.long().unsqueeze(1)).squeeze(1)

    def unpick(self, shape: Shape, index: Array, values: Array) -> Array:
        column = index.long().unsqueeze(1)
        return self.zeros(tuple(shape), values.dtype).scatter_(1, column, values.reshape(-1, 1).expand(column.shape))

    # Products, convolution and pooling.

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)

    def conv2d(self, x: Array, w: Array, window: Window, groups: int) -> tuple[Array, Any]:
        return F.conv2d(x, w, None, window.stride, window.padding, window.dilation, groups), (x, window)

    def conv2d_input(self, g: Array, w: Array, shape: Shape, window: Window, groups: int) -> Array:
        x = self.empty((1,), g.dtype).expand(tuple(shape))  # only its shape matters
        return _conv2d_back(g, x, w, window, groups, 0)

    def conv2d_weight(self, g: Array, saved: Any, w: Array, groups: int, out: Array | None) -> Array:
        x, window = saved
        gradient = _conv2d_back(g, x, w, window, groups, 1)
        return gradient if out is None else self.copy(gradient, out)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Any]:
        y, places = F.max_pool2d_with_indices(x, *window)
        return y, places

    def max_pool2d_input(self, g: Array, saved: Any, shape: Shape) -> Array:
        n, c, rows, columns = shape
        flat = self.zeros((n, c, rows * columns), g.dtype)
        return flat.scatter_add_(2, saved.flatten(2), g.flatten(2)).view(tuple(shape))

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        return F.avg_pool2d(x, window.kernel, window.stride, window.padding)

    def avg_pool2d_input(self, g: Array, shape: Shape, window: Window) -> Array:
        x = self.empty((1,), g.dtype).expand(tuple(shape))
        options = window.kernel, window.stride, window.padding, False, True, None
        return torch.ops.aten.avg_pool2d_backward(g, x, *options)

    # Chance.

    def uniform(self, generator: np.random.Generator, shape: Shape, dtype: Any) -> Array:
        return self.from_numpy(generator.random(tuple(shape), _NUMPY[dtype].type))


def _conv2d_back(g: Array, x: Array, w: Array, window: Window, groups: int, which: int) -> Array:
    """Return the gradient of the input (0) or of the weight (1)."""
    output_mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(
        g, x, w, None, window.stride, window.padding, window.dilation, False, (0, 0), groups, output_mask
    )[which]
