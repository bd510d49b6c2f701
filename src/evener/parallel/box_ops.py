"""Boxes of images and volumes: their positions, and pooling, resizing and transposed convolution of a box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.oracle.division.layout import Interval, Layout
from evener.oracle.division.network import Adaptive, Linear, Nearest, Sliding, Spreading, WindowRule
from evener.system.accelerators import moved

_MAX_POOL: dict[int, Callable[..., Tensor]] = {2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE_MAX_POOL: dict[int, Callable[..., Tensor]] = {2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {2: F.conv_transpose2d, 3: F.conv_transpose3d}
"""Functions for images and for volumes, by number of sides."""


@dataclass(frozen=True, slots=True)
class Box:
    """Some rows and columns of an image, or planes, rows and columns of a volume.

    Attributes:
        sides: The interval [first, end) along every side, counted in the whole.
    """

    sides: tuple[Interval, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size along every side."""
        return tuple(b - a for a, b in self.sides)

    @property
    def is_empty(self) -> bool:
        """Whether the box has no pixel."""
        return min(self.shape) <= 0

    def common(self, other: Box) -> Box:
        """Return the pixels of both boxes."""
        return Box(tuple(_common(*pair) for pair in zip(self.sides, other.sides, strict=True)))

    def without(self, core: Box) -> list[Box]:
        """Return the rest around `core`, which lies inside, as boxes: before and behind it along each side."""
        if core.is_empty:
            return [] if self.is_empty else [self]
        rest = []
        for i, ((first, last), (start, end)) in enumerate(zip(self.sides, core.sides, strict=True)):
            for interval in ((first, start), (end, last)):
                rest.append(Box((*core.sides[:i], interval, *self.sides[i + 1 :])))
        return [one for one in rest if not one.is_empty]

    def place_in(self, held: Box) -> tuple[slice, ...]:
        """Return the position of these pixels in a tensor (N, C, ...) of the pixels of `held`."""
        sides = zip(self.sides, held.sides, strict=True)
        return (slice(None), slice(None), *(slice(a - start, b - start) for (a, b), (start, _) in sides))

    def of(self, x: Tensor, held: Box) -> Tensor:
        """Return these pixels of `x` (N, C, ...), which holds the box `held`, as a view."""
        return x[self.place_in(held)]


def held_by(layout: Layout, rank: int, shape: Sequence[int]) -> Box:
    """Return the box of an image or volume of `shape` (N, C, ...) that `rank` holds."""
    return Box(tuple(side[0] if side else (0, 0) for side in layout.region(rank, tuple(shape))[2:]))


def reached(windows: Sequence[WindowRule], outputs: Box) -> Box:
    """Return the box that the windows of `outputs` read, also beyond the image."""
    return Box(tuple(window.reach(*side) for window, side in zip(windows, outputs.sides, strict=True)))


def touched(windows: Sequence[Sliding], pixels: Box) -> Box:
    """Return the outputs whose windows read any of `pixels`."""
    return Box(tuple(window.touched(*side) for window, side in zip(windows, pixels.sides, strict=True)))


def margins(inner: Box, outer: Box) -> tuple[tuple[int, int], ...]:
    """Return pixels of `outer` before and behind `inner` along every side; negative where `inner` sticks out."""
    return tuple((a - c, d - b) for (a, b), (c, d) in zip(inner.sides, outer.sides, strict=True))


def surround(x: Tensor, held: Box, wanted: Box, value: float = 0.0) -> Tensor:
    """Return the box `wanted` from `x`, which holds `held`, filled with `value`; `x` itself if both are equal."""
    around = [size for pair in reversed(margins(held, wanted)) for size in pair]
    return F.pad(x, around, value=value) if any(around) else x


def _common(one: Interval, other: Interval) -> Interval:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def empty_output(shape: Sequence[int], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros of `shape` that depend, with zero gradients, on all `tensors`.

    `dtype` defaults to the one in which layers with weights compute.
    """
    dtype = dtype or compute_dtype(tensors[0])
    tie = torch.stack([tensor.flatten()[:0].sum().to(dtype) for tensor in tensors]).sum()
    return tie.expand(tuple(shape))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of convolutions and linear layers: that of autocast, which leaves double precision alone."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def max_pool(x: Tensor, pool: Any, windows: Sequence[Sliding], held: Box, outputs: Box) -> Tensor:
    """Return maxima, with minus infinity around the image. `pool` is a MaxPool2d or MaxPool3d."""
    x = surround(x, held, reached(windows, outputs), -torch.inf)
    return _MAX_POOL[len(windows)](x, pool.kernel_size, pool.stride, 0, pool.dilation)


def average_pool(
    x: Tensor, pool: Any, image: Sequence[int], windows: Sequence[Sliding], held: Box, outputs: Box
) -> Tensor:
    """Return means over windows; the divisor depends on a window's position in an `image` of these sizes.

    `pool` is an AvgPool2d or AvgPool3d.
    """
    x = surround(x, held, reached(windows, outputs))
    sums = _AVERAGE_POOL[len(windows)](x, pool.kernel_size, pool.stride, 0, divisor_override=1)
    counts = torch.tensor(pool.divisor_override or 1)
    if not pool.divisor_override:
        for window, side, size in zip(windows, outputs.sides, image, strict=True):
            counts = counts[..., None] * _counts(window, side, size, pool.count_include_pad)
    return sums / moved(counts.to(sums.dtype), sums.device)


def adaptive_average(x: Tensor, windows: Sequence[Adaptive], held: Box, outputs: Box) -> Tensor:
    """Return means over adaptive windows."""
    return _by_matrices(_means, x, windows, held, outputs)


def adaptive_maximum(x: Tensor, windows: Sequence[Adaptive], held: Box, outputs: Box) -> Tensor:
    """Return maxima over adaptive windows."""
    pool, sides = _ADAPTIVE_MAX_POOL[len(windows)], outputs.sides

    def maxima(fixed: tuple[Interval, ...]) -> Tensor:
        """Return the outputs at the positions `fixed` along the first sides."""
        if len(fixed) == len(sides):
            cell: Tensor = pool(reached(windows, Box(fixed)).of(x, held), 1)
            return cell
        cells = [maxima((*fixed, (one, one + 1))) for one in range(*sides[len(fixed)])]
        return torch.cat(cells, 2 + len(fixed))

    return maxima(())


def nearest(x: Tensor, windows: Sequence[Nearest], held: Box, outputs: Box) -> Tensor:
    """Return copies of the nearest pixels."""
    for dim, (window, side, pixels) in enumerate(zip(windows, outputs.sides, held.sides, strict=True), start=2):
        places = [window.source(output) - pixels[0] for output in range(*side)]
        x = x.index_select(dim, moved(torch.tensor(places), x.device))
    return x


def linear(x: Tensor, windows: Sequence[Linear], held: Box, outputs: Box) -> Tensor:
    """Return linear interpolations of neighbouring pixels."""
    return _by_matrices(_mixture, x, windows, held, outputs)


def transposed(x: Tensor, convolution: Any, windows: Sequence[Spreading], held: Box, outputs: Box) -> Tensor:
    """Return the outputs of a ConvTranspose2d or ConvTranspose3d from these pixels, with the bias."""
    settings: dict[str, Any] = {name: getattr(convolution, name) for name in ("stride", "groups", "dilation")}
    y = _TRANSPOSED[len(windows)](x, convolution.weight, **settings)
    firsts = [w.stride * side[0] - w.padding for w, side in zip(windows, held.sides, strict=True)]
    made = Box(tuple((first, first + size) for first, size in zip(firsts, y.shape[2:], strict=True)))
    y = surround(y, made, outputs)
    return y if convolution.bias is None else y + convolution.bias.to(y.dtype).view(-1, *[1] * len(windows))


def _by_matrices(
    matrix: Callable[[Any, Interval, Interval], Tensor],
    x: Tensor,
    windows: Sequence[WindowRule],
    held: Box,
    outputs: Box,
) -> Tensor:
    """Multiply each side by its `matrix` (outputs, held)."""
    for dim, (window, side, pixels) in enumerate(zip(windows, outputs.sides, held.sides, strict=True), start=2):
        weights = moved(matrix(window, side, pixels).to(x.dtype), x.device)
        x = (x.movedim(dim, -1) @ weights.t()).movedim(-1, dim)
    return x


def _counts(window: Sliding, outputs: Interval, size: int, count_padding: bool) -> Tensor:
    """Return the number of pixels of each window along one side, with padding if it counts."""
    around = window.before if count_padding else 0
    starts = torch.arange(*outputs) * window.stride - window.before
    ends = torch.clamp(starts + window.kernel, max=size + around)
    return ends - torch.clamp(starts, min=-around)


def _means(window: Adaptive, outputs: Interval, held: Interval) -> Tensor:
    """Return the matrix (outputs, held) of the mean over each window, float64."""
    matrix = torch.zeros(outputs[1] - outputs[0], held[1] - held[0], dtype=torch.float64)
    for i, output in enumerate(range(*outputs)):
        first, last = window.reach(output, output + 1)
        matrix[i, first - held[0] : last - held[0]] = 1 / (last - first)
    return matrix


def _mixture(window: Linear, outputs: Interval, held: Interval) -> Tensor:
    """Return the matrix (outputs, held) of linear interpolation, float64."""
    matrix = torch.zeros(outputs[1] - outputs[0], held[1] - held[0], dtype=torch.float64)
    for i, output in enumerate(range(*outputs)):
        place = window.position(output)
        first, last = window.reach(output, output + 1)
        matrix[i, first - held[0]] += 1 - (place - first)
        matrix[i, last - 1 - held[0]] += place - first
    return matrix
