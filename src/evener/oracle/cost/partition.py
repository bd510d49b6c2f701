"""How ranks of one replica divide every layer, and what they then exchange: `oracle.division`, in columns of numbers.

What is decided does not depend on the ranks' shares, so it is decided once for a model and a mode; for each replica
only the numbers are filled in, all layers at once:

    pattern             which moves (see `division.moves`)       sent by rank r, of a value of V bytes, own part v_r
    spread              own part to all others                   (p-1) v_r
    collect             addends of all others' parts to them     V - v_r
    reduce              a ring                                   2 (p-1)/p V
    among neighbours    what others need of the own part         the common parts of all pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np

from evener.oracle.cost.layers import Counts, Flags, Layers, Numbers
from evener.oracle.cost.operations import LayerOperations, Published, operations_of
from evener.oracle.cost.roofline import LayerShare
from evener.oracle.division.layout import Parts, Replica, Shape, common, length, ring_bytes
from evener.oracle.division.moves import PATTERNS, Pattern
from evener.oracle.division.placement import Placement, Split, layout_of, parts_of
from evener.oracle.division.planner import DividedNetwork, divide_network
from evener.oracle.division.rules import Division

Mode: TypeAlias = Division | Literal["none"]
MODES: tuple[Division, ...] = get_args(Division)


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


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """What every rank of a replica does of every layer.

    Attributes:
        layers: how they are divided, whoever the ranks are.
        shares: of the ranks, summing to 1.
        parts: of every rank: fractions of filters and channels, and of rows or of what follows divided channels.
        forward, backward: what they exchange.
    """

    layers: DividedLayers
    shares: tuple[float, ...]
    parts: tuple[LayerShare, ...]
    forward: PassExchanges
    backward: PassExchanges

    def parameter_bytes(self, rank: int) -> Numbers:
        """Bytes of every layer's parameters that `rank` holds."""
        part, layers = self.parts[rank], self.layers.layers
        weights = (layers.weight_bytes - layers.bias_bytes) * part.filters * part.channels
        return weights * np.where(self.layers.follows, part.rows, 1.0) + layers.bias_bytes * part.filters

    def value_share(self, rank: int) -> Numbers:
        """The fraction of every layer's values that `rank` holds."""
        if self.layers.mode == "sharded":
            return np.where(self.layers.is_divided, self.shares[rank], 1.0)
        return self.parts[rank].rows

    def kept_bytes(self, rank: int) -> Numbers:
        """Bytes of one sample that `rank` keeps of every layer for backward."""
        layers = self.layers.layers
        kept = layers.kept_bytes * self.value_share(rank)
        if self.layers.mode == "sharded":
            return kept + layers.input_bytes * self.layers.gathers
        return kept + layers.input_bytes * np.where(self.layers.by_channel, self.parts[rank].channels, 0.0)

    @property
    def sent_bytes(self) -> Numbers:
        """Bytes that every rank sends for one sample, in both passes."""
        return self.forward.sent + self.backward.sent


@dataclass(frozen=True)
class _Transfer:
    """A value that is brought elsewhere, for one layer.

    Attributes:
        layer: that needs it.
        shape: of the value.
        have, need: where it is and where it is needed.
        patterns: in which it, and its gradient, is exchanged.
        is_trained: whether it has a gradient.
    """

    layer: int
    shape: Shape
    have: Placement
    need: Placement
    patterns: tuple[Pattern | None, Pattern | None]
    is_trained: bool

    @property
    def owners(self) -> Placement:
        """Who owns which part."""
        return self.have if self.have.state == "split" else self.need


_Neighbours: TypeAlias = dict[tuple[Placement, Placement, Shape], tuple[Numbers, Numbers]]
"""Bytes that every rank sends and receives, by what is brought where."""
_Splits: TypeAlias = dict[tuple[Split, int], int]
"""Numbers of the ways in which dims of a size are split."""


class _Columns:
    """Transfers that gather the owners' parts, or add all up, one an entry: what does not depend on shares."""

    def __init__(self, transfers: Sequence[_Transfer], element_bytes: int, splits: _Splits) -> None:
        self.layer = np.array([one.layer for one in transfers], dtype=np.int64)
        self.volume = np.array([float(prod(one.shape) * element_bytes) for one in transfers])
        self.split = np.array([_number(splits, one.owners, one.shape) for one in transfers], dtype=np.int64)
        self.ways = tuple(_PassPatterns(transfers, way) for way in (0, 1))


class _PassPatterns:
    """Of the forward (0) or backward (1) pass, which transfers follow which pattern, and which take their part."""

    def __init__(self, transfers: Sequence[_Transfer], way: int) -> None:
        self.spread, self.collect, self.reduce = (
            np.array([one.patterns[way] == name for one in transfers], dtype=bool) for name in get_args(Pattern)
        )
        self.gathers = self.spread | self.collect
        takers = [_takes_part(one, way) for one in transfers]
        self.takes_part = np.array(takers, dtype=bool) & ~self.gathers & ~self.reduce


def _takes_part(transfer: _Transfer, way: int) -> bool:
    """Whether a rank takes its channels out of all, of the value or of its gradient; of images, rows are views."""
    if transfer.owners.along(1) is None:
        return False
    if way == 0:
        return transfer.need.state == "split"
    return transfer.have.state == "split" and transfer.need.state == "alike" and transfer.is_trained


def _number(splits: _Splits, placement: Placement, shape: Shape) -> int:
    """The number of how `placement` divides its first dim; -1 if it divides none."""
    if not placement.splits:
        return -1
    dim, split = placement.splits[0]
    return splits.setdefault((split, shape[dim]), len(splits))


class DividedLayers:
    """How a model's layers are divided, whoever the ranks are.

    Args:
        layers: of the model.
        mode: in which they are divided.
        size: number of ranks, which counts for `hybrid` and `published` alone.
        published: see `TrainingJob`.
    """

    def __init__(self, layers: Layers, mode: Division, size: int, published: bool) -> None:
        self.layers, self.mode, self.published = layers, mode, published
        rules = Published(size=size, by_channel=mode == "channel", by_rows=mode == "spatial") if published else None
        self.operations: LayerOperations = operations_of(layers.graph, rules)
        self.network: DividedNetwork = divide_network(self.operations.network, mode, size)
        choices = [self.network.operations[i].choice for i in self.operations.of_layers]
        self.by_filter: Flags = np.array([choice.mode == "filter" for choice in choices])
        self.by_channel: Flags = np.array([choice.mode == "channel" for choice in choices])
        self.by_rows: Flags = np.array([choice.gives.along(2) is not None for choice in choices])
        self.follows: Flags = np.array([c.mode == "" and c.gives.along(1) is not None for c in choices])
        self.is_divided: Flags = self.by_filter | self.by_channel | self.follows
        self._splits: dict[tuple[Split, int], int] = {}
        transfers = list(self._transfers())
        neighbours = [one for one in transfers if one.have.state == one.need.state]
        self._neighbours = neighbours
        self._columns = _Columns(
            [one for one in transfers if one.have.state != one.need.state], layers.element_bytes, self._splits
        )
        needs_all = {one.layer for one in transfers if one.have.state == "split" and one.need.state == "whole"}
        self.gathers: Flags = self.by_filter & np.array([i in needs_all for i in range(len(layers))])
        self._parts = self._find_parts()

    @cached_property
    def adds_gradients(self) -> Flags:
        """Layers of whose weights each rank has all and uses them for its part: their gradients are addends."""
        states = [{weight.state for weight in self.network.operations[i].weights} for i in self.operations.of_layers]
        return np.array(["whole" in found for found in states])

    def among(self, replica: Replica) -> ModelSplit:
        """What each rank of `replica` does of them."""
        counts = np.zeros((len(self._splits) + 1, replica.size))  # the last one is of what no dim divides
        for number, (split, _) in enumerate(self._splits):
            counts[number] = [length(part) for part in parts_of(split, replica)]
        neighbours = (
            {key: self._between(*key, replica) for key in {(one.have, one.need, one.shape) for one in self._neighbours}}
            if not self.published
            else {}
        )
        own = counts[self._columns.split] * (self._columns.volume / self._sizes[self._columns.split])[:, None]
        return ModelSplit(
            layers=self,
            shares=tuple(share / sum(replica.shares) for share in replica.shares),
            parts=self._shares_of_layers(counts, replica.size),
            forward=self._pass(0, own, replica.size, neighbours),
            backward=self._pass(1, own, replica.size, neighbours),
        )

    @cached_property
    def _sizes(self) -> Numbers:
        return np.array([*(float(size) for _, size in self._splits), 1.0])

    def _transfers(self) -> list[_Transfer]:
        """All values that are moved, before operations and (what windows reach beyond) within them."""
        trained, values, found = self._trained(), self.operations.network.operations, []
        for index, divided in enumerate(self.network.operations):
            moves = [(one.value, one.have, one.need) for one in divided.transfers]
            if divided.choice.reach is not None:
                moves.append((values[index].inputs[0], divided.choice.needs[0], divided.choice.reach))
            for value, have, need in moves:
                forward, backward = PATTERNS[have.state, need.state]
                patterns = forward, backward if trained[value] else None
                found.append(
                    _Transfer(self.operations.owners[index], values[value].shape, have, need, patterns, trained[value])
                )
        return found

    def _trained(self) -> list[bool]:
        """Of every operation, whether its output has a gradient; as published, even the strips of the samples."""
        trained: list[bool] = []
        for operation in self.operations.network.operations:
            own = any(weight.trainable for weight in operation.weights) or (self.published and self.mode == "spatial")
            trained.append(own or any(trained[i] for i in operation.inputs))
        return trained

    def _find_parts(self) -> dict[str, tuple[Counts, Counts]]:
        """(layers, numbers of splits) of which a rank does its fraction: of filters, channels, and rows or values."""
        found: dict[str, list[tuple[int, int]]] = {"filters": [], "channels": [], "rows": []}
        values = self.operations.network.operations
        for layer, index in enumerate(self.operations.of_layers):
            choice, operation = self.network.operations[index].choice, values[index]
            gives, shape, column = choice.gives, operation.shape, "rows"
            if choice.mode == "filter":
                column = "filters"
            elif choice.mode == "channel" or gives.state == "partial":
                gives, shape = choice.needs[0], values[operation.inputs[0]].shape
                column = "channels" if choice.mode else "rows"
            if gives.state == "split":
                found[column].append((layer, _number(self._splits, gives, shape)))
        return {name: _pair(rows) for name, rows in found.items()}

    def _shares_of_layers(self, counts: Numbers, size: int) -> tuple[LayerShare, ...]:
        columns = {}
        for name, (layers, numbers) in self._parts.items():
            columns[name] = np.ones((size, len(self.layers)))
            columns[name][:, layers] = (counts[numbers] / self._sizes[numbers][:, None]).T
        return tuple(LayerShare(**{name: table[rank] for name, table in columns.items()}) for rank in range(size))

    def _pass(self, way: int, own: Numbers, size: int, neighbours: _Neighbours) -> PassExchanges:
        """The exchanges of the forward (0) or backward (1) pass; `own`: bytes of every value on every rank."""
        columns, count = self._columns, len(self.layers)
        one_way = columns.ways[way]
        steps = (size - 1) * (one_way.gathers + 2.0 * one_way.reduce)
        share = np.where(one_way.reduce, columns.volume / size, own.max(axis=1, initial=0.0))
        copied = 2 * columns.volume * (one_way.gathers + one_way.takes_part / size)
        collected = (columns.volume[one_way.collect, None] - own[one_way.collect]).sum(axis=0)
        sent = (size - 1) * own[one_way.spread].sum(axis=0) + collected
        sums = [
            np.bincount(columns.layer, weights=values, minlength=count).astype(np.float64)
            for values in (steps, steps * share, 1.0 * (one_way.gathers | one_way.reduce), copied)
        ]
        sent = sent + ring_bytes(columns.volume[one_way.reduce].sum(), size)
        for one in self._neighbours:
            if one.patterns[way] is not None:
                given, taken = self._of_neighbours(one, size, neighbours)
                sent = sent + (given if way == 0 else taken)
                busiest = taken.max() if way == 0 else given.max()
                for column, value in zip(sums, (1.0 * (busiest > 0), busiest, 1.0 * (busiest > 0)), strict=False):
                    column[one.layer] += value
        messages, nbytes, collectives, copies = sums
        return PassExchanges(messages=messages, nbytes=nbytes, collectives=collectives, copied=copies, sent=sent)

    def _of_neighbours(self, one: _Transfer, size: int, neighbours: _Neighbours) -> tuple[Numbers, Numbers]:
        """Bytes that every rank (sends, receives) so that all have what they need; as published, rows of windows."""
        if self.published:
            halo = np.full(size, self.layers.halo_bytes[one.layer])
            return halo, halo
        return neighbours[one.have, one.need, one.shape]

    def _between(self, have: Placement, need: Placement, shape: Shape, replica: Replica) -> tuple[Numbers, Numbers]:
        own, wanted = layout_of(have, replica), layout_of(need, replica)
        table = np.full((replica.size, replica.size), float(self.layers.element_bytes))
        for dim, size in enumerate(shape):
            whole = (((0, size),),) * replica.size
            one, other = own.along(dim), wanted.along(dim)
            table *= size if one is None and other is None else _overlaps(one or whole, other or whole)
        np.fill_diagonal(table, 0.0)
        return table.sum(axis=1), table.sum(axis=0)


def _overlaps(own: Parts, wanted: Parts) -> Numbers:
    """Indices that rank i has and rank j wants, of one dim."""
    if all(len(part) < 2 for part in (*own, *wanted)):
        (starts, ends), (firsts, lasts) = (np.array([p[0] if p else (0, 0) for p in x], float).T for x in (own, wanted))
        found: Numbers = np.minimum(ends[:, None], lasts) - np.maximum(starts[:, None], firsts)
        return np.maximum(found, 0.0)
    return np.array([[float(common((a,), (b,))) for b in wanted] for a in own])


def _pair(rows: list[tuple[int, int]]) -> tuple[Counts, Counts]:
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
