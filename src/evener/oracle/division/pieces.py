"""Which part of a whole tensor somebody holds, and whether some parts together are all of it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from evener.oracle.division.layout import Region, Shape, length
from evener.records.schema import Part


class Piece(Part, frozen=True, kw_only=True):
    """A part of a tensor.

    Attributes:
        shape: of the whole.
        region: that the part is: its intervals along every dim.
    """

    shape: Shape
    region: Region

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(map(length, self.region))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return all(intervals == ((0, size),) for intervals, size in zip(self.region, self.shape, strict=True))


def whole_piece(shape: Iterable[int]) -> Piece:
    """All of a tensor of `shape`."""
    sizes = tuple(shape)
    return Piece(shape=sizes, region=tuple(((0, size),) for size in sizes))


def place_of(region: Region) -> tuple[np.ndarray, ...]:
    """Where `region` lies in the whole, as NumPy and PyTorch index it: an open mesh of indices."""
    return np.ix_(*(np.asarray([i for a, b in intervals for i in range(a, b)], dtype=int) for intervals in region))


def covers(pieces: Iterable[Piece], shape: Shape) -> bool:
    """Whether `pieces` of a tensor of `shape`, which may overlap, are all of it."""
    found = {piece.region for piece in pieces}
    if whole_piece(shape).region in found:
        return True
    is_held = np.zeros(shape, dtype=bool)
    for region in found:
        is_held[place_of(region)] = True
    return bool(is_held.all())
