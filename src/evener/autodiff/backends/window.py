"""Where a convolution or a pooling reads: kernel, stride, padding and dilation of both image axes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Pair = tuple[int, int]


class Window(NamedTuple):
    """Result (i, j) reads rows stride * i + dilation * k - padding for k below kernel, and columns alike.

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
