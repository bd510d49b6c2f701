"""Exchanges of a replica's ranks in a pass: the patterns once per division, the bytes for each replica's shares.

pattern             what moves (see `layout.PATTERNS`)       sent by rank r, for a value of V bytes and its part v_r
spread              its part to all others                   (p-1) v_r
collect             addends of all others' parts to them     V - v_r
reduce              a ring                                   2 (p-1)/p V
among neighbours    the part that other ranks need           the overlap of all pairs
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
    """The exchanges of the ranks in one pass over one sample, as columns over layers.

    Attributes:
        messages: number of consecutive messages, each of which takes the latency.
        nbytes: bytes of the busiest rank in these messages.
        collectives: number of collectives that are started.
        copied: bytes moved in memory to split and join tensors.
        sent: bytes by rank, over all layers.
    """

    messages: Numbers
    nbytes: Numbers
    collectives: Numbers
    copied: Numbers
    sent: Numbers


class SplitSizes:
    """The different splits of dims, numbered in order of their first use; -1 stands for no split."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Split, int], int] = {}

    def number(self, placement: Placement, shape: Shape) -> int:
        """Return the number of the split by which `placement` divides the first divided dim of `shape`."""
        if not placement.splits:
            return -1
        dim, split = placement.splits[0]
        return self._numbers.setdefault((split, shape[dim]), len(self._numbers))

    @property
    def dim_sizes(self) -> Numbers:
        """The size of the dim of each split."""
        return np.array([*(float(size) for _, size in self._numbers), 1.0])

    def among(self, replica: Replica) -> Numbers:
        """Return the number of indices that each rank has of each split, [splits, ranks]; zero for no split."""
        rows = [[length(part) for part in parts_of(split, replica)] for split, _ in self._numbers]
        return np.array([*rows, [0] * replica.size], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class LayerTransfer:
    """A value that a layer needs in another placement.

    Attributes:
        layer: number of the layer that needs it.
        shape, nbytes: shape and size of the value.
        have, need: the placement where it is and the one where it is needed.
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
        """The placement that says which rank owns which part."""
        return self.have if self.have.state == "split" else self.need

    @property
    def is_among_neighbours(self) -> bool:
        """Whether ranks exchange only overlapping parts."""
        return self.have.state == self.need.state

    def pattern(self, direction: int) -> Pattern | None:
        """Return the pattern of the forward exchange (0), or of the gradient's exchange backward (1)."""
        patterns = PATTERNS[self.have.state, self.need.state]
        return patterns[direction] if direction == 0 or self.is_trained else None

    def takes_part(self, direction: int) -> bool:
        """Return whether a rank copies its channels out of the value or its gradient; rows of images are views."""
        if self.owners.along(1) is None or self.pattern(direction) is not None:
            return False
        if direction == 0:
            return self.need.state == "split"
        return self.have.state == "split" and self.need.state == "alike" and self.is_trained


class Neighbours:
    """Values of which ranks need parts that other ranks have: the overlaps of pairs of ranks.

    Args:
        transfers: transfers of all layers.
        element_bytes: bytes of a number.
        halo_bytes: bytes that each rank sends and receives for each layer instead, if the division is as published.
    """

    def __init__(
        self, transfers: Sequence[LayerTransfer], element_bytes: int, halo_bytes: Numbers | None = None
    ) -> None:
        self._element_bytes, self._halo_bytes = element_bytes, halo_bytes
        kinds = [
            (transfer.have, transfer.need, transfer.shape) for transfer in transfers if transfer.is_among_neighbours
        ]
        self._kinds = list(dict.fromkeys(kinds))

    def numbers(self, transfers: Sequence[LayerTransfer]) -> Counts:
        """Return the number of each of `transfers` in this collection."""
        if self._halo_bytes is not None:
            return _layers_of(transfers)
        kinds = [(transfer.have, transfer.need, transfer.shape) for transfer in transfers]
        return np.array([self._kinds.index(kind) for kind in kinds], dtype=np.int64)

    def among(self, replica: Replica) -> tuple[Numbers, Numbers]:
        """Return the bytes that each rank of `replica` sends and receives, [values, ranks]."""
        if self._halo_bytes is not None:
            halo = np.repeat(self._halo_bytes[:, None], replica.size, axis=1)
            return halo, halo
        table = np.zeros((len(self._kinds), replica.size, replica.size))
        for number, (have, need, shape) in enumerate(self._kinds):
            held, needed = layout_of(have, replica), layout_of(need, replica)
            table[number] = self._element_bytes
            for dim, size in enumerate(shape):
                held_parts, needed_parts = held.along(dim), needed.along(dim)
                if held_parts is None and needed_parts is None:
                    table[number] *= size
                else:
                    table[number] *= _indices(held_parts, size, replica) @ _indices(needed_parts, size, replica).T
            np.fill_diagonal(table[number], 0.0)
        return table.sum(axis=2), table.sum(axis=1)


def _indices(parts: Parts | None, size: int, replica: Replica) -> Numbers:
    """Return a table [ranks, indices] that is 1 where a rank has an index."""
    if parts is None:
        return np.ones((replica.size, size))
    table = np.zeros((replica.size, size))
    for row, part in zip(table, parts, strict=True):
        for a, b in part:
            row[a:b] = 1.0
    return table


class PassPatterns:
    """The exchanges of the forward (0) or backward (1) pass, for any shares of the ranks.

    Args:
        direction: 0 for forward, 1 for backward.
        transfers: transfers of all layers.
        layers: number of layers.
        splits: numbers of the splits.
        neighbours: values that are exchanged among neighbours.
    """

    def __init__(
        self,
        direction: int,
        transfers: Sequence[LayerTransfer],
        layers: int,
        splits: SplitSizes,
        neighbours: Neighbours,
    ) -> None:
        self._direction, self._layers = direction, layers
        self._near = [
            transfer for transfer in transfers if transfer.is_among_neighbours and transfer.pattern(direction)
        ]
        self._near_numbers, self._near_layers = neighbours.numbers(self._near), _layers_of(self._near)
        far = [transfer for transfer in transfers if not transfer.is_among_neighbours]
        spread, collect, reduce = (
            [transfer for transfer in far if transfer.pattern(direction) == name]
            for name in ("spread", "collect", "reduce")
        )
        gathered = spread + collect
        self._spread = len(spread)
        self._gather_layers = _layers_of(gathered)
        owners = [splits.number(transfer.owners, transfer.shape) for transfer in gathered]
        self._splits = np.array(owners, dtype=np.int64)
        self._volumes = np.array([float(transfer.nbytes) for transfer in gathered])
        self._collected = float(self._volumes[self._spread :].sum())
        self._gathers, self._gathered = self._count_and_bytes(gathered)
        self._reduces, self._reduced = self._count_and_bytes(reduce)
        _, self._taken = self._count_and_bytes([transfer for transfer in far if transfer.takes_part(direction)])

    def _count_and_bytes(self, transfers: Sequence[LayerTransfer]) -> tuple[Numbers, Numbers]:
        """Return the number of each layer's `transfers`, and their bytes."""
        layers, volumes = _layers_of(transfers), np.array([float(transfer.nbytes) for transfer in transfers])
        return self._at_layers(layers, np.ones(len(layers))), self._at_layers(layers, volumes)

    def among(self, sizes: Numbers, counts: Numbers, sent_near: Numbers, received_near: Numbers) -> PassExchanges:
        """Return the exchanges of ranks with given shares.

        Args:
            sizes: size of each split's dim.
            counts: indices of each split on each rank.
            sent_near, received_near: bytes forward between each rank and its neighbours, [values, ranks].
        """
        size = counts.shape[1]
        parts = counts[self._splits] * (self._volumes / sizes[self._splits])[:, None]
        sent = (size - 1) * parts[: self._spread].sum(axis=0) + (self._collected - parts[self._spread :].sum(axis=0))
        ring = 2.0 * (size - 1) * self._reduced / size
        sent = sent + ring.sum()
        messages = (size - 1) * (self._gathers + 2.0 * self._reduces)
        nbytes = ring + (size - 1) * self._at_layers(self._gather_layers, parts.max(axis=1, initial=0.0))
        collectives: Numbers = self._gathers + self._reduces
        if len(self._near):
            near, others = (sent_near, received_near) if self._direction == 0 else (received_near, sent_near)
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
    return np.array([transfer.layer for transfer in transfers], dtype=np.int64)
