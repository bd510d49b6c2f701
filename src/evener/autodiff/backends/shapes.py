"""Shapes that results have: of elementwise operations, of indexing, of windows that move over images."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Pair = tuple[int, int]


@lru_cache(maxsize=1024)
def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """The shape of an elementwise result. Raises ValueError where the shapes do not go together."""
    return np.broadcast_shapes(a, b)


def names_once(index: Any) -> bool:
    """Whether an index names no element twice, because it is made of integers, slices, None and Ellipsis alone."""
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index)


class Window(NamedTuple):
    """Where a convolution or a pooling reads.

    Result (i, j) reads rows stride * i + dilation * k - padding for k below kernel, and columns alike.

    Attributes:
        kernel: rows and columns of the kernel.
        stride: from one result to the next.
        padding: rows and columns added on both sides.
        dilation: from one element of the kernel to the next.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def reach(self) -> Pair:
        """Rows and columns from the first to the last element of the kernel."""
        return self.dilation[0] * (self.kernel[0] - 1) + 1, self.dilation[1] * (self.kernel[1] - 1) + 1

    def results(self, rows: int, columns: int) -> Pair:
        """Rows and columns of the result for an image of `rows` and `columns`; below 1 if the kernel does not fit."""
        return _results(self, rows, columns)


@lru_cache(maxsize=1024)
def _results(window: Window, rows: int, columns: int) -> Pair:
    (down, right), (top, left), (stride_down, stride_right) = window.reach, window.padding, window.stride
    return (rows + 2 * top - down) // stride_down + 1, (columns + 2 * left - right) // stride_right + 1
