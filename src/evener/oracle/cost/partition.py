"""How ranks of one replica divide every layer: the decisions of `oracle.division`, as columns of numbers.

The decisions do not depend on the ranks' shares, so they are made once for a model and a mode. For each replica only
the numbers are filled in, for all layers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np

from evener.oracle.cost.exchanges import LayerTransfer, Neighbours, PassExchanges, PassPatterns, SplitSizes
from evener.oracle.cost.layers import Counts, Flags, Layers, Numbers
from evener.oracle.cost.operations import Published, operations_of
from evener.oracle.cost.roofline import LayerShare
from evener.oracle.division.layout import Replica
from evener.oracle.division.planner import divide_network
from evener.oracle.division.rules import Division

Mode: TypeAlias = Division | Literal["none"]
MODES: tuple[Division, ...] = get_args(Division)


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """The part of every layer that each rank of a replica does; tables are [ranks, layers].

    Attributes:
        layers: how the layers are divided, for any shares.
        shares: shares of the ranks, which sum to 1.
        parts: fractions of filters and channels, and of rows or of values that follow divided channels.
        forward, backward: what the ranks exchange in each pass.
    """

    layers: DividedLayers
    shares: tuple[float, ...]
    parts: LayerShare
    forward: PassExchanges
    backward: PassExchanges

    @cached_property
    def parameter_bytes(self) -> Numbers:
        """Bytes of every layer's parameters that each rank holds."""
        part, layers = self.parts, self.layers.layers
        weights = (layers.weight_bytes - layers.bias_bytes) * part.filters * part.channels
        return weights * np.where(self.layers.follows, part.rows, 1.0) + layers.bias_bytes * part.filters

    @cached_property
    def value_share(self) -> Numbers:
        """The fraction of every layer's values that each rank holds."""
        if self.layers.mode == "sharded":
            return np.where(self.layers.is_divided, np.array(self.shares)[:, None], 1.0)
        return self.parts.rows

    @property
    def kept_bytes(self) -> Numbers:
        """Bytes of one sample that each rank keeps of every layer for backward."""
        layers = self.layers.layers
        kept_bytes = layers.kept_bytes * self.value_share
        if self.layers.mode == "sharded":
            return kept_bytes + layers.input_bytes * self.layers.gathers
        return kept_bytes + layers.input_bytes * self.layers.by_channel * self.parts.channels

    @property
    def sent_bytes(self) -> Numbers:
        """Bytes that every rank sends for one sample, in both passes."""
        return self.forward.sent + self.backward.sent


class DividedLayers:
    """How a model's layers are divided, for any shares of the ranks.

    Args:
        layers: the model's layers.
        mode: how they are divided.
        size: number of ranks, which matters for `hybrid` and `published` only.
        published: as in `TrainingJob`.
    """

    def __init__(self, layers: Layers, mode: Division, size: int, published: bool) -> None:
        self.layers, self.mode = layers, mode
        rules = Published(size=size, by_channel=mode == "channel", by_rows=mode == "spatial") if published else None
        self._operations = operations_of(layers.graph, rules)
        self._network = divide_network(self._operations.network, mode, size)
        choices = [self._network.operations[i].choice for i in self._operations.of_layers]
        self.by_filter: Flags = np.array([choice.mode == "filter" for choice in choices])
        self.by_channel: Flags = np.array([choice.mode == "channel" for choice in choices])
        self.by_rows: Flags = np.array([choice.gives.along(2) is not None for choice in choices])
        self.follows: Flags = np.array([c.mode == "" and c.gives.along(1) is not None for c in choices])
        self.is_divided: Flags = self.by_filter | self.by_channel | self.follows
        self._splits = SplitSizes()
        transfers = list(self._transfers(trains_input=published and mode == "spatial"))
        needs_all = {move.layer for move in transfers if move.have.state == "split" and move.need.state == "whole"}
        self.gathers: Flags = self.by_filter & np.array([i in needs_all for i in range(len(layers))])
        self._parts = self._find_parts()
        self._neighbours = Neighbours(transfers, layers.element_bytes, layers.halo_bytes if published else None)
        self._passes = [PassPatterns(i, transfers, len(layers), self._splits, self._neighbours) for i in (0, 1)]
        self._sizes = self._splits.dim_sizes

    @cached_property
    def adds_gradients(self) -> Flags:
        """Layers whose weights every rank holds completely and uses for its part: their gradients must be summed."""
        states = [{weight.state for weight in self._network.operations[i].weights} for i in self._operations.of_layers]
        return np.array(["whole" in layer_states for layer_states in states])

    def among(self, replica: Replica) -> ModelSplit:
        """Return what each rank of `replica` does of the layers."""
        counts = self._splits.among(replica)
        near = self._neighbours.among(replica)
        forward, backward = (patterns.among(self._sizes, counts, *near) for patterns in self._passes)
        columns = {name: np.ones((replica.size, len(self.layers))) for name in self._parts}
        for name, (layers, numbers) in self._parts.items():
            columns[name][:, layers] = (counts[numbers] / self._sizes[numbers, None]).T
        return ModelSplit(
            layers=self,
            shares=tuple(share / sum(replica.shares) for share in replica.shares),
            parts=LayerShare(**columns),
            forward=forward,
            backward=backward,
        )

    def _transfers(self, trains_input: bool) -> Iterator[LayerTransfer]:
        """Yield all values that are moved, before operations and (where windows reach beyond a part) within them."""
        values, trained = self._operations.network.operations, self._trained(trains_input)
        for index, divided in enumerate(self._network.operations):
            moves = [(move.value, move.have, move.need) for move in divided.transfers]
            if divided.choice.reach is not None:
                moves.append((values[index].inputs[0], divided.choice.needs[0], divided.choice.reach))
            for value, have, need in moves:
                yield LayerTransfer(
                    layer=self._operations.owners[index],
                    shape=values[value].shape,
                    nbytes=prod(values[value].shape) * self.layers.element_bytes,
                    have=have,
                    need=need,
                    is_trained=trained[value],
                )

    def _trained(self, trains_input: bool) -> list[bool]:
        """Return whether each operation's output has a gradient; as published, the strips of samples have one, too."""
        trained: list[bool] = []
        for operation in self._operations.network.operations:
            has_weights = trains_input or any(weight.trainable for weight in operation.weights)
            trained.append(has_weights or any(trained[i] for i in operation.inputs))
        return trained

    def _find_parts(self) -> dict[str, tuple[Counts, Counts]]:
        """Return (layers, numbers of splits) whose filters, channels, and rows or values a rank does a fraction of."""
        splits: dict[str, list[tuple[int, int]]] = {"filters": [], "channels": [], "rows": []}
        values = self._operations.network.operations
        for layer, index in enumerate(self._operations.of_layers):
            choice, operation = self._network.operations[index].choice, values[index]
            gives, shape, column = choice.gives, operation.shape, "rows"
            if choice.mode == "filter":
                column = "filters"
            elif choice.mode == "channel" or gives.state == "partial":
                gives, shape = choice.needs[0], values[operation.inputs[0]].shape
                column = "channels" if choice.mode else "rows"
            if gives.state == "split":
                splits[column].append((layer, self._splits.number(gives, shape)))
        tables = {name: np.array(rows, dtype=np.int64).reshape(-1, 2) for name, rows in splits.items()}
        return {name: (table[:, 0], table[:, 1]) for name, table in tables.items()}
