"""Rectangles of images: where one lies in another; pooling, resizing and transposed convolution of one, or of none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.oracle.division.layout import Interval, Layout
from evener.oracle.division.network import Adaptive, Linear, Nearest, Sliding, Spreading, WindowRule


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Some rows and columns, each from the first to behind the last, counted in the whole image."""

    rows: Interval
    columns: Interval

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def is_empty(self) -> bool:
        """Whether it has no pixel."""
        return min(self.shape) <= 0

    def common(self, other: Rectangle) -> Rectangle:
        """The pixels of both."""
        return Rectangle(_common(self.rows, other.rows), _common(self.columns, other.columns))

    def without(self, core: Rectangle) -> list[Rectangle]:
        """The rest around `core`, which lies inside, as rectangles: above, below, left, right of it."""
        if core.is_empty:
            return [] if self.is_empty else [self]
        (top, bottom), (left, right) = self.rows, self.columns
        rest = (
            Rectangle((top, core.rows[0]), self.columns),
            Rectangle((core.rows[1], bottom), self.columns),
            Rectangle(core.rows, (left, core.columns[0])),
            Rectangle(core.rows, (core.columns[1], right)),
        )
        return [one for one in rest if not one.is_empty]

    def of(self, x: Tensor, held: Rectangle) -> Tensor:
        """These pixels of `x` (N, C, H, W), which holds the rectangle `held`: a view."""
        (a, b), (c, d) = _within(self.rows, held.rows), _within(self.columns, held.columns)
        return x[:, :, a:b, c:d]


def held_by(layout: Layout, rank: int, shape: Sequence[int]) -> Rectangle:
    """The rectangle of an image of `shape` (N, C, H, W) that `rank` holds."""
    rows, columns = layout.region(rank, tuple(shape))[2:]
    return Rectangle(_one(rows), _one(columns))


def reached(windows: Sequence[WindowRule], outputs: Rectangle) -> Rectangle:
    """What the windows of `outputs` reach, also beyond the image."""
    return Rectangle(windows[0].reach(*outputs.rows), windows[1].reach(*outputs.columns))


def touched(windows: Sequence[Sliding], pixels: Rectangle) -> Rectangle:
    """The outputs whose windows lie over any of `pixels`."""
    return Rectangle(windows[0].touched(*pixels.rows), windows[1].touched(*pixels.columns))


def margins(inner: Rectangle, outer: Rectangle) -> tuple[int, int, int, int]:
    """Pixels of `outer` left of, right of, above and below `inner`, negative where `inner` sticks out."""
    left, right = inner.columns[0] - outer.columns[0], outer.columns[1] - inner.columns[1]
    return left, right, inner.rows[0] - outer.rows[0], outer.rows[1] - inner.rows[1]


def surround(x: Tensor, held: Rectangle, wanted: Rectangle, value: float = 0.0) -> Tensor:
    """The rectangle `wanted` made of `x`, which holds `held`, and of `value` around it; `x` itself if that is it."""
    around = margins(held, wanted)
    return F.pad(x, around, value=value) if any(around) else x


def _common(one: Interval, other: Interval) -> Interval:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def _within(inner: Interval, outer: Interval) -> Interval:
    return inner[0] - outer[0], inner[1] - outer[0]


def _one(intervals: Sequence[Interval]) -> Interval:
    return intervals[0] if intervals else (0, 0)


def empty_output(shape: Sequence[int], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros of `shape` that depend (with gradients of zero) on all `tensors`, of which they would be computed.

    `dtype` is by default the type in which layers with weights compute.
    """
    dtype = dtype or compute_dtype(tensors[0])
    tie = torch.stack([tensor.flatten()[:0].sum().to(dtype) for tensor in tensors]).sum()
    return tie.expand(tuple(shape))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which convolutions and linear layers compute: that of autocast, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def max_pool(x: Tensor, pool: nn.MaxPool2d, windows: Sequence[Sliding], held: Rectangle, outputs: Rectangle) -> Tensor:
    """Maxima; what lies around the image is less than any number."""
    x = surround(x, held, reached(windows, outputs), -torch.inf)
    return F.max_pool2d(x, pool.kernel_size, pool.stride, 0, pool.dilation)


def average_pool(
    x: Tensor, pool: nn.AvgPool2d, image: Sequence[int], windows: Sequence[Sliding], held: Rectangle, outputs: Rectangle
) -> Tensor:
    """Means; how many pixels each one is of depends on where it lies in an `image` of so many rows and columns."""
    x = surround(x, held, reached(windows, outputs))
    sums = F.avg_pool2d(x, pool.kernel_size, pool.stride, 0, divisor_override=1)
    if pool.divisor_override:
        return sums / pool.divisor_override
    ranges = zip(windows, (outputs.rows, outputs.columns), image, strict=True)
    rows, columns = (_counts(w, where, size, pool.count_include_pad) for w, where, size in ranges)
    return sums / (rows[:, None] * columns).to(sums)


def adaptive_average(x: Tensor, windows: Sequence[Adaptive], held: Rectangle, outputs: Rectangle) -> Tensor:
    """Means over adaptive windows."""
    return _by_matrices(_means, x, windows, held, outputs)


def adaptive_maximum(x: Tensor, windows: Sequence[Adaptive], held: Rectangle, outputs: Rectangle) -> Tensor:
    """Maxima over adaptive windows."""
    rows = []
    for row in range(*outputs.rows):
        cells = []
        for column in range(*outputs.columns):
            cell = reached(windows, Rectangle((row, row + 1), (column, column + 1)))
            cells.append(F.adaptive_max_pool2d(cell.of(x, held), 1))
        rows.append(torch.cat(cells, 3))
    return torch.cat(rows, 2)


def nearest(x: Tensor, windows: Sequence[Nearest], held: Rectangle, outputs: Rectangle) -> Tensor:
    """Copies of pixels."""
    for dim, window, where, own in zip((2, 3), windows, *_sides(outputs, held), strict=True):
        places = [window.source(output) - own[0] for output in range(*where)]
        x = x.index_select(dim, torch.tensor(places, device=x.device))
    return x


def linear(x: Tensor, windows: Sequence[Linear], held: Rectangle, outputs: Rectangle) -> Tensor:
    """Mixtures of neighbouring pixels."""
    return _by_matrices(_mixture, x, windows, held, outputs)


def transposed(
    x: Tensor,
    convolution: nn.ConvTranspose2d,
    windows: Sequence[Spreading],
    held: Rectangle,
    outputs: Rectangle,
) -> Tensor:
    """What the pixels add to the outputs, and the bias."""
    settings: dict[str, Any] = {name: getattr(convolution, name) for name in ("stride", "groups", "dilation")}
    y = F.conv_transpose2d(x, convolution.weight, **settings)
    first = [w.stride * side[0] - w.padding for w, side in zip(windows, (held.rows, held.columns), strict=True)]
    made = Rectangle((first[0], first[0] + y.shape[2]), (first[1], first[1] + y.shape[3]))
    y = surround(y, made, outputs)
    return y if convolution.bias is None else y + convolution.bias.to(y.dtype).view(-1, 1, 1)


def _by_matrices(
    matrix: Callable[[Any, Interval, Interval], Tensor],
    x: Tensor,
    windows: Sequence[WindowRule],
    held: Rectangle,
    outputs: Rectangle,
) -> Tensor:
    """Along rows, then along columns: a `matrix` (outputs, held) of each."""
    rows, columns = (matrix(*one).to(x) for one in zip(windows, *_sides(outputs, held), strict=True))
    return rows @ x @ columns.t()


def _sides(outputs: Rectangle, held: Rectangle) -> tuple[tuple[Interval, Interval], tuple[Interval, Interval]]:
    return (outputs.rows, outputs.columns), (held.rows, held.columns)


def _counts(window: Sliding, outputs: Interval, size: int, count_padding: bool) -> Tensor:
    """Number of pixels along one side of each window; those of the padding too if they count."""
    around = window.before if count_padding else 0
    starts = torch.arange(*outputs) * window.stride - window.before
    ends = torch.clamp(starts + window.kernel, max=size + around)
    return ends - torch.clamp(starts, min=-around)


def _means(window: Adaptive, outputs: Interval, held: Interval) -> Tensor:
    """The matrix (outputs, held) of the mean over each window, float64."""
    matrix = torch.zeros(outputs[1] - outputs[0], held[1] - held[0], dtype=torch.float64)
    for i, output in enumerate(range(*outputs)):
        first, last = window.reach(output, output + 1)
        matrix[i, first - held[0] : last - held[0]] = 1 / (last - first)
    return matrix


def _mixture(window: Linear, outputs: Interval, held: Interval) -> Tensor:
    """The matrix (outputs, held) of linear interpolation, float64."""
    matrix = torch.zeros(outputs[1] - outputs[0], held[1] - held[0], dtype=torch.float64)
    for i, output in enumerate(range(*outputs)):
        place = window.place(output)
        first, last = window.reach(output, output + 1)
        matrix[i, first - held[0]] += 1 - (place - first)
        matrix[i, last - 1 - held[0]] += place - first
    return matrix
