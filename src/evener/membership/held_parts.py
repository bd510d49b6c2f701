"""The choice of remaining parts of a divided model's state that form the newest whole state. Pure.

    a rank holds    its live part, of its last step
                    copies of its part and of a neighbour's, of an earlier step
                    the whole state, while it extracts its part

The run continues from the newest step whose parts cover every tensor. With several replicas this is the last step,
because another replica holds the parts of a lost rank. With a single replica it is the step of the last copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evener.oracle.division.layout import Shape
from evener.oracle.division.pieces import Piece, covers
from evener.records.errors import NodeLost
from evener.records.schema import Part, Whole


class HeldPart(Part, frozen=True, kw_only=True):
    """A part of the state after a step that a rank holds.

    Attributes:
        step: of the state.
        pieces: of weights, by name.
    """

    step: Whole
    pieces: dict[str, Piece]


class HeldParts(Part, frozen=True, kw_only=True):
    """The parts that one rank holds, and the shapes of the whole state.

    Attributes:
        held: parts of the rank.
        shapes: of all tensors of the whole state, by name; empty if unknown.
    """

    held: tuple[HeldPart, ...]
    shapes: dict[str, Shape] = {}


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The parts that form the whole state.

    Attributes:
        step: of the state.
        givers: needed parts as (rank, index of its part), the largest first.
    """

    step: int
    givers: tuple[tuple[int, int], ...]


def choose(rows: Sequence[HeldParts]) -> Recovery:
    """Return the newest whole state that the parts of all ranks, `rows`, can form.

    Raises:
        NodeLost: the parts do not cover the model.
    """
    shapes = next((row.shapes for row in rows if row.shapes), {})
    steps = sorted({one.step for row in rows for one in row.held}, reverse=True)
    for step in steps if shapes else ():
        givers = _givers(rows, shapes, step)
        if givers:
            return Recovery(step=step, givers=givers)
    raise NodeLost(
        "the remaining nodes do not hold all parts of the model; continue from the last checkpoint with --resume"
    )


def _givers(rows: Sequence[HeldParts], shapes: Mapping[str, Shape], step: int) -> tuple[tuple[int, int], ...]:
    """Return as few parts of `step` as cover all tensors; empty if they do not."""
    offered = [
        (rank, number, one.pieces)
        for rank, row in enumerate(rows)
        for number, one in enumerate(row.held)
        if one.step == step
    ]
    missing, met = set(shapes), dict.fromkeys(shapes, frozenset[Piece]())
    givers = []
    for rank, number, pieces in sorted(offered, key=lambda one: (-_amount(one[2]), one[0])):
        new = [name for name in pieces.keys() & missing if pieces[name] not in met[name]]
        if not new:
            continue
        givers.append((rank, number))
        for name in new:
            met[name] |= {pieces[name]}
            if covers(met[name], shapes[name]):
                missing.discard(name)
    return () if missing else tuple(givers)


def _amount(pieces: Mapping[str, Piece]) -> int:
    """Return the number of elements of all tensors."""
    return sum(piece.numel for piece in pieces.values())
