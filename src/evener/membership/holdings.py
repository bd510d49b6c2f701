"""Which parts of a divided model's state are left, and which of them make the newest whole one. Pure.

    a rank holds    its live part, of the last step that it made
                    copies: its own part and a neighbour's, of a step before
                    the whole state, while it takes its part of it

The newest step whose parts cover every tensor is the one to go on from. Where there are several replicas that is the
last one: what a rank held that is gone, another replica holds. Where there is one it is that of the last copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evener.oracle.division.layout import Shape
from evener.oracle.division.pieces import Piece, covers
from evener.records.errors import NodeLost
from evener.records.schema import Part, Whole


class Holding(Part, frozen=True, kw_only=True):
    """Something that a rank holds of the state after a step.

    Attributes:
        step: whose state it is.
        pieces: of weights, by name.
    """

    step: Whole
    pieces: dict[str, Piece]


class Holdings(Part, frozen=True, kw_only=True):
    """What one rank holds, and how the whole looks.

    Attributes:
        held: by the rank.
        shapes: of all tensors of the whole, by name; empty if it does not know.
    """

    held: tuple[Holding, ...]
    shapes: dict[str, Shape] = {}


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From what the whole state is made.

    Attributes:
        step: whose state it is.
        givers: what is needed of whom: (rank, number of its holding), those that are needed most first.
    """

    step: int
    givers: tuple[tuple[int, int], ...]


def choose(rows: Sequence[Holdings]) -> Recovery:
    """The newest whole state that can be made of what all ranks hold, `rows`, and from what of it.

    Raises:
        NodeLost: there is none.
    """
    shapes = next((row.shapes for row in rows if row.shapes), {})
    steps = sorted({one.step for row in rows for one in row.held}, reverse=True)
    for step in steps if shapes else ():
        found = _givers(rows, shapes, step)
        if found:
            return Recovery(step=step, givers=found)
    raise NodeLost(
        "the nodes that are left do not hold all parts of the model; go on from the last checkpoint with --resume"
    )


def _givers(rows: Sequence[Holdings], shapes: Mapping[str, Shape], step: int) -> tuple[tuple[int, int], ...]:
    """As few holdings of `step` as cover all tensors; none if all of them do not."""
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
    """Elements, of all tensors together."""
    return sum(piece.numel for piece in pieces.values())
