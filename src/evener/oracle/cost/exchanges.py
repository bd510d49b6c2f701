"""What the ranks of a replica exchange in a pass: of a division the patterns, once; of a replica's shares the bytes.

pattern             which moves (see `layout.PATTERNS`)       sent by rank r, of a value of V bytes, own part v_r
spread              own part to all others                   (p-1) v_r
collect             addends of all others' parts to them     V - v_r
reduce              a ring                                   2 (p-1)/p V
among neighbours    what others need of the own part         the common parts of all pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.oracle.cost.layers import Counts, Numbers
from evener.oracle.division.layout import PATTERNS, Parts, Pattern, Replica, Shape, length
from evener.oracle.division.placement import Placement, Split, layout_of, parts_of


@dataclass(frozen=True, kw_only=True)
class PassExchanges:
    """What the ranks exchange in one pass over one sample, in columns over layers.

    Attributes:
        messages: after each other, each of which takes the latency.
        nbytes: of the rank that is busiest, in these messages.
        collectives: that are started.
        copied: bytes moved in memory to take tensors apart and to put them together.
        sent: bytes by rank, over all layers.
    """

    messages: Numbers
    nbytes: Numbers
    collectives: Numbers
    copied: Numbers
    sent: Numbers


class SplitSizes:
    """The ways in which dims are split, numbered as they are met; -1 is no split at all."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Split, int], int] = {}

    def number(self, placement: Placement, shape: Shape) -> int:
        """Of how `placement` divides the first dim of `shape` that it divides."""
        if not placement.splits:
            return -1
        dim, split = placement.splits[0]
        return self._numbers.setdefault((split, shape[dim]), len(self._numbers))

    @property
    def whole(self) -> Numbers:
        """Sizes of the dims."""
        return np.array([*(float(size) for _, size in self._numbers), 1.0])

    def among(self, replica: Replica) -> Numbers:
        """Of every split, how many indices each rank has; zero of what is not split."""
        rows = [[length(part) for part in parts_of(split, replica)] for split, _ in self._numbers]
        return np.array([*rows, [0] * replica.size], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class LayerTransfer:
    """A value that is brought elsewhere, for one layer.

    Attributes:
        layer: that needs it.
        shape, nbytes: of the value.
        have, need: where it is and where it is needed.
        is_trained: whether it has a gradient.
    """

    layer: int
    shape: Shape
    nbytes: int
    have: Placement
    need: Placement
    is_trained: bool

    @property
    def owners(self) -> Placement:
        """Who owns which part."""
        return self.have if self.have.state == "split" else self.need

    @property
    def is_among_neighbours(self) -> bool:
        """Whether ranks tell each other only what overlaps."""
        return self.have.state == self.need.state

    def pattern(self, way: int) -> Pattern | None:
        """In which it is exchanged forward (0), or its gradient backward (1)."""
        return PATTERNS[self.have.state, self.need.state][way] if way == 0 or self.is_trained else None

    def takes_part(self, way: int) -> bool:
        """Whether a rank takes its channels out of all, of the value or its gradient; of images, rows are views."""
        if self.owners.along(1) is None or self.pattern(way) is not None:
            return False
        if way == 0:
            return self.need.state == "split"
        return self.have.state == "split" and self.need.state == "alike" and self.is_trained


class Neighbours:
    """Values of which ranks need parts that others have: what overlaps, by pairs of ranks.

    Args:
        transfers: of all layers.
        element_bytes: of a number.
        halo_bytes: of every layer, that each rank sends and receives instead, as published.
    """

    def __init__(
        self, transfers: Sequence[LayerTransfer], element_bytes: int, halo_bytes: Numbers | None = None
    ) -> None:
        self._element_bytes, self._halo_bytes = element_bytes, halo_bytes
        kinds = [(one.have, one.need, one.shape) for one in transfers if one.is_among_neighbours]
        self._kinds = list(dict.fromkeys(kinds))

    def numbers(self, transfers: Sequence[LayerTransfer]) -> Counts:
        """Of every one of `transfers`, its number here."""
        if self._halo_bytes is not None:
            return _layers_of(transfers)
        return np.array([self._kinds.index((one.have, one.need, one.shape)) for one in transfers], dtype=np.int64)

    def among(self, replica: Replica) -> tuple[Numbers, Numbers]:
        """Bytes that each rank of `replica` sends and receives, [values, ranks]."""
        if self._halo_bytes is not None:
            halo = np.repeat(self._halo_bytes[:, None], replica.size, axis=1)
            return halo, halo
        table = np.zeros((len(self._kinds), replica.size, replica.size))
        for number, (have, need, shape) in enumerate(self._kinds):
            own, wanted = layout_of(have, replica), layout_of(need, replica)
            table[number] = self._element_bytes
            for dim, size in enumerate(shape):
                one, other = own.along(dim), wanted.along(dim)
                if one is None and other is None:
                    table[number] *= size
                else:
                    table[number] *= _indices(one, size, replica) @ _indices(other, size, replica).T
            np.fill_diagonal(table[number], 0.0)
        return table.sum(axis=2), table.sum(axis=1)


def _indices(parts: Parts | None, size: int, replica: Replica) -> Numbers:
    """[ranks, indices], 1 where a rank has an index."""
    if parts is None:
        return np.ones((replica.size, size))
    table = np.zeros((replica.size, size))
    for row, part in zip(table, parts, strict=True):
        for a, b in part:
            row[a:b] = 1.0
    return table


class PassPatterns:
    """The exchanges of the forward (0) or backward (1) pass, whoever the ranks are.

    Args:
        way: forward or backward.
        transfers: of all layers.
        layers: their number.
        splits: in which splits are looked up.
        neighbours: in which values are looked up that are exchanged among neighbours.
    """

    def __init__(
        self,
        way: int,
        transfers: Sequence[LayerTransfer],
        layers: int,
        splits: SplitSizes,
        neighbours: Neighbours,
    ) -> None:
        self._way, self._layers = way, layers
        self._near = [one for one in transfers if one.is_among_neighbours and one.pattern(way)]
        self._near_numbers, self._near_layers = neighbours.numbers(self._near), _layers_of(self._near)
        far = [one for one in transfers if not one.is_among_neighbours]
        found = {name: [one for one in far if one.pattern(way) == name] for name in ("spread", "collect", "reduce")}
        gathered = found["spread"] + found["collect"]
        self._spread = len(found["spread"])
        self._gather_layers = _layers_of(gathered)
        self._splits = np.array([splits.number(one.owners, one.shape) for one in gathered], dtype=np.int64)
        self._volumes = np.array([float(one.nbytes) for one in gathered])
        self._collected = float(self._volumes[self._spread :].sum())
        self._gathers, self._gathered = self._count_and_bytes(gathered)
        self._reduces, self._reduced = self._count_and_bytes(found["reduce"])
        _, self._taken = self._count_and_bytes([one for one in far if one.takes_part(way)])

    def _count_and_bytes(self, transfers: Sequence[LayerTransfer]) -> tuple[Numbers, Numbers]:
        """Of every layer, the number of its `transfers`, and their bytes."""
        layers, volumes = _layers_of(transfers), np.array([float(one.nbytes) for one in transfers])
        return self._at_layers(layers, np.ones(len(layers))), self._at_layers(layers, volumes)

    def among(self, sizes: Numbers, counts: Numbers, given: Numbers, taken: Numbers) -> PassExchanges:
        """What ranks exchange that have `counts` of the splits of dims of `sizes`; `given`, `taken`: by neighbours."""
        size = counts.shape[1]
        own = counts[self._splits] * (self._volumes / sizes[self._splits])[:, None]
        sent = (size - 1) * own[: self._spread].sum(axis=0) + (self._collected - own[self._spread :].sum(axis=0))
        ring = 2.0 * (size - 1) * self._reduced / size
        sent = sent + ring.sum()
        messages = (size - 1) * (self._gathers + 2.0 * self._reduces)
        nbytes = ring + (size - 1) * self._at_layers(self._gather_layers, own.max(axis=1, initial=0.0))
        collectives: Numbers = self._gathers + self._reduces
        if len(self._near):
            near, others = (given, taken) if self._way == 0 else (taken, given)
            busiest = others.max(axis=1)[self._near_numbers]
            used = self._at_layers(self._near_layers, 1.0 * (busiest > 0))
            sent = sent + near[self._near_numbers].sum(axis=0)
            messages, collectives = messages + used, collectives + used
            nbytes = nbytes + self._at_layers(self._near_layers, busiest)
        copied = 2 * (self._gathered + self._taken / size)
        return PassExchanges(messages=messages, nbytes=nbytes, collectives=collectives, copied=copied, sent=sent)

    def _at_layers(self, layers: Counts, values: Numbers) -> Numbers:
        return np.bincount(layers, weights=values, minlength=self._layers).astype(np.float64)


def _layers_of(transfers: Sequence[LayerTransfer]) -> Counts:
    return np.array([one.layer for one in transfers], dtype=np.int64)
