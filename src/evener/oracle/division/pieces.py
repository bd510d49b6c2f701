"""The part of a tensor that a rank holds, and whether several parts together are the complete tensor."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from evener.oracle.division.layout import Region, Shape, length
from evener.records.schema import Part


class Piece(Part, frozen=True, kw_only=True):
    """A part of a tensor.

    Attributes:
        shape: shape of the complete tensor.
        region: intervals of the part along every dim.
    """

    shape: Shape
    region: Region

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(map(length, self.region))

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the complete tensor."""
        return all(intervals == ((0, size),) for intervals, size in zip(self.region, self.shape, strict=True))


def whole_piece(shape: Iterable[int]) -> Piece:
    """Return the piece that is the complete tensor of `shape`."""
    sizes = tuple(shape)
    return Piece(shape=sizes, region=tuple(((0, size),) for size in sizes))


def region_indices(region: Region) -> tuple[np.ndarray, ...]:
    """Return the indices of `region` in the complete tensor, for NumPy and PyTorch: an open mesh."""
    return np.ix_(*(np.asarray([i for a, b in intervals for i in range(a, b)], dtype=int) for intervals in region))


def covers(pieces: Iterable[Piece], shape: Shape) -> bool:
    """Return whether `pieces` of a tensor of `shape`, which may overlap, cover it completely."""
    regions = {piece.region for piece in pieces}
    if whole_piece(shape).region in regions:
        return True
    is_held = np.zeros(shape, dtype=bool)
    for region in regions:
        is_held[region_indices(region)] = True
    return bool(is_held.all())
