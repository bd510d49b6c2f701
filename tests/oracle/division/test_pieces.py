"""Whether parts of a tensor cover it."""

from __future__ import annotations

import numpy as np

from evener.oracle.division.pieces import Piece, covers, region_indices, whole_piece


def piece(*region: tuple[tuple[int, int], ...]) -> Piece:
    """Return a piece of a 4 by 6 matrix."""
    return Piece(shape=(4, 6), region=region)


def test_parts_that_overlap_or_have_several_intervals_cover_a_tensor() -> None:
    left, right = piece(((0, 4),), ((0, 2), (4, 5))), piece(((0, 4),), ((1, 4), (5, 6)))
    assert covers([left, right], (4, 6))
    assert not covers([left], (4, 6))
    assert not covers([left, piece(((0, 3),), ((2, 6),))], (4, 6))
    assert not covers([], (4, 6))
    assert covers([whole_piece((4, 6))], (4, 6))
    assert covers([whole_piece(())], ())


def test_an_empty_part_has_no_elements_and_a_complete_one_has_all() -> None:
    empty = piece(((0, 4),), ())
    assert (empty.numel, empty.is_whole) == (0, False)
    assert not covers([empty], (4, 6))
    assert (whole_piece((4, 6)).numel, whole_piece((4, 6)).is_whole) == (24, True)


def test_a_part_is_indexed_by_its_intervals() -> None:
    matrix = np.arange(24).reshape(4, 6)
    assert matrix[region_indices(((((1, 2), (3, 4))), ((0, 1), (4, 6))))].tolist() == [[6, 10, 11], [18, 22, 23]]
