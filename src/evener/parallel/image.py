"""Rectangles of images: where one lies within another, and how much zero lies around it in what windows reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from evener.oracle.division.layout import Interval, Layout
from evener.oracle.division.windows import Sliding, Window


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


def reached(windows: Sequence[Window], outputs: Rectangle) -> Rectangle:
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
