"""How ranks of one replica divide every layer: the decisions of `oracle.division`, as columns of numbers.

The decisions do not depend on the ranks' shares, so they are made once for a model and a mode. For each replica only
the numbers are filled in, for all layers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from evener.oracle.cost.exchanges import LayerTransfer, Neighbours, PassExchanges, PassPatterns, SplitSizes
from evener.oracle.cost.layers import Counts, Flags, Layers, Numbers
from evener.oracle.cost.roofline import LayerShare
from evener.oracle.division.layout import Replica, Shape
from evener.oracle.division.network import Adaptive, Kind, Network, Operation, Sliding, Spreading, Weight, WindowRule
from evener.oracle.division.planner import divide_network
from evener.oracle.division.rules import DivisionName
from evener.records.graph import Layer, ModelGraph

Mode: TypeAlias = DivisionName | Literal["none"]
MODES: tuple[DivisionName, ...] = get_args(DivisionName)


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

    def __init__(self, layers: Layers, mode: DivisionName, size: int, published: bool) -> None:
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


_IDENTITY = (Sliding(1, 1, 0), Sliding(1, 1, 0))


@dataclass(frozen=True)
class LayerOperations:
    """A graph's operations.

    Attributes:
        network: the network to divide.
        owners: number of the layer that does each operation; the last layer for an output.
        of_layers: the operation of each layer.
    """

    network: Network
    owners: tuple[int, ...]
    of_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """How Kahira et al. 2021 divide a model, where that differs from Evener.

    Linear layers, and channels that are fewer than `size` ranks, are not divided. Every layer exchanges the gradient of
    its input by itself. Images come in strips, and an average gathers them.
    """

    size: int
    by_channel: bool = False
    by_rows: bool = False

    def is_whole(self, layer: Layer) -> bool:
        """Return whether `layer` is not divided."""
        few = self.by_channel and layer.channels < self.size
        return (layer.window is None and layer.kind in ("Linear", "AdaptiveAvgPool2d")) or (layer.has_weights and few)


def operations_of(graph: ModelGraph, published: Published | None = None) -> LayerOperations:
    """Return the operations of `graph`, as Evener performs them or as they were `published`."""
    builder = _OperationList(published)
    for index, layer in enumerate(graph.layers):
        builder.add_layer(index, layer)
    read = {i for operation in builder.operations for i in operation.inputs}
    last = tuple(i for i in range(len(builder.operations)) if i not in read)
    builder.add(len(graph.layers) - 1, "output", "output", last, ())
    return LayerOperations(Network(tuple(builder.operations)), tuple(builder.owners), tuple(builder.of_layer.values()))


@dataclass
class _OperationList:
    """The operations so far, with the layer that each belongs to."""

    published: Published | None
    operations: list[Operation] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    of_layer: dict[str, int] = field(default_factory=dict)

    def add(self, owner: int, name: str, kind: Kind, inputs: tuple[int, ...], shape: Shape, **more: Any) -> int:
        """Append an operation and return its index."""
        self.operations.append(Operation(name=name, kind=kind, inputs=inputs, shape=shape, **more))
        self.owners.append(owner)
        return len(self.operations) - 1

    def add_layer(self, index: int, layer: Layer) -> None:
        """Append `layer` with the operations in front of it."""
        sources = tuple(self.of_layer[name] for name in layer.inputs) or (self._input(index, layer),)
        source = sources[0] if len(sources) == 1 else self._join(index, layer, sources)
        if len(sources) > 1 and not layer.input_shape:
            self.of_layer[layer.name] = source
            return
        kind = _kind(layer)
        if self.published is not None and self.published.is_whole(layer):
            kind = "other"
        source = self._adapted(index, layer, source, kind)
        if self.published is not None and not self.published.by_rows and kind == "convolution":
            source = self.add(index, f"{layer.name} reads", "pointwise", (source,), self.operations[source].shape)
        input_shape = self.operations[source].shape
        output_shape = _output_shape(layer, kind, input_shape)
        self.of_layer[layer.name] = self.add(
            index, layer.name, kind, (source,), output_shape,
            windows=_windows(layer, kind, input_shape, output_shape),
            groups=layer.groups if kind == "convolution" else 1,
            filter_dim=int(layer.window is not None and layer.window.transposed),
            weights=_weights(layer, kind, input_shape, output_shape),
        )  # fmt: skip

    def _input(self, index: int, layer: Layer) -> int:
        shape = _shape(layer.input_shape or layer.output_shape)
        source = self.add(index, f"{layer.name} input", "input", (), shape)
        if self.published is None or not self.published.by_rows:
            return source
        return self.add(index, f"{layer.name} strips", "pool", (source,), shape, windows=_IDENTITY)

    def _join(self, index: int, layer: Layer, sources: tuple[int, ...]) -> int:
        """Append the sum of `sources`, or their concatenation if the layer reads all their elements."""
        shapes = [self.operations[source].shape for source in sources]
        name = layer.name if not layer.input_shape else f"{layer.name} joins"
        if sum(map(prod, shapes)) != (layer.input_size or layer.output_size):
            return self.add(index, name, "pointwise", sources, max(shapes, key=prod))
        if len({shape[2:] for shape in shapes}) > 1:
            return self.add(index, name, "other", sources, _shape(layer.input_shape or layer.output_shape))
        return self.add(index, name, "concat", sources, (1, sum(shape[1] for shape in shapes), *shapes[0][2:]))

    def _adapted(self, index: int, layer: Layer, source: int, kind: Kind) -> int:
        """Return the value that the layer reads: `source`, or an appended operation that reshapes it."""
        have = self.operations[source].shape
        need = _input_shape(layer, kind, have)
        if need == have:
            return source
        name = f"{layer.name} takes"
        if need[1] == prod(have) and len(need) == 2:
            return self.add(index, name, "flatten", (source,), need)
        if need[1] < have[1] and need[2:] == have[2:]:
            return self.add(index, name, "part", (source,), need, bounds=(0, need[1]))
        return self.add(index, name, "other", (source,), need)


def _kind(layer: Layer) -> Kind:
    if layer.kind.startswith("Conv") and layer.window is not None:
        return "convolution"
    if layer.has_weights and layer.window is None:
        return "linear"
    if layer.kind.startswith("Adaptive"):
        is_mean = "Avg" in layer.kind and all(size == 1 for size in layer.output_shape[1:])
        return "average" if is_mean else "pool"
    names: dict[str, Kind] = {"BatchNorm": "batch_norm", "GroupNorm": "group_norm", "Upsample": "resize"}
    named = next((kind for name, kind in names.items() if layer.kind.startswith(name)), None)
    if named is not None or layer.kind == "Flatten":
        return named or "flatten"
    if "channel" not in layer.splits:
        return "other"
    return "pool" if layer.window is not None else "pointwise"


def _shape(sizes: tuple[int, ...]) -> Shape:
    """Return the shape of a value of one sample: channels first for images and volumes, last for tokens."""
    if len(sizes) == 2:
        return (1, sizes[1], sizes[0])
    return (1, *sizes[:2], prod(sizes[2:])) if len(sizes) > 2 else (1, *sizes) if sizes else (1, 1)


def _features_last(sizes: tuple[int, ...]) -> Shape:
    positions = prod(sizes[:-1])
    return (1, sizes[-1], positions) if positions > 1 else (1, sizes[-1])


def _input_shape(layer: Layer, kind: Kind, have: Shape) -> Shape:
    if kind == "linear":
        return _features_last(layer.input_shape) if layer.input_shape else have
    if layer.window is not None or kind in ("average", "pool", "resize"):
        return _with_channels_first(layer.input_shape) if layer.input_shape else have
    return have if layer.input_size in (0, prod(have)) else _shape(layer.input_shape)


def _output_shape(layer: Layer, kind: Kind, input_shape: Shape) -> Shape:
    if kind == "linear":
        return _features_last(layer.output_shape)
    if layer.window is not None or kind in ("average", "pool", "resize"):
        return _with_channels_first(layer.output_shape)
    if kind == "flatten":
        return (1, layer.output_size)
    return input_shape if prod(input_shape) == layer.output_size else _shape(layer.output_shape)


def _with_channels_first(sizes: tuple[int, ...]) -> Shape:
    return (1, *sizes[:2], prod(sizes[2:])) if len(sizes) > 2 else (1, *sizes)


def _windows(layer: Layer, kind: Kind, input_shape: Shape, output_shape: Shape) -> tuple[WindowRule, ...]:
    if len(input_shape) != 4 or len(output_shape) != 4 or kind not in ("convolution", "pool", "resize"):
        return ()
    if layer.window is None:
        return tuple(Adaptive(n, m) for n, m in zip(input_shape[2:], output_shape[2:], strict=True))
    window = layer.window
    rule = Spreading if window.transposed else Sliding
    sizes = zip(window.kernel, window.stride, window.padding, window.dilation, strict=True)
    rows, *columns = (rule(*size) for size in sizes)
    return (rows, columns[0] if len(columns) == 1 else Adaptive(input_shape[3], output_shape[3]))


def _weights(layer: Layer, kind: Kind, input_shape: Shape, output_shape: Shape) -> tuple[Weight, ...]:
    if not layer.parameters:
        return ()
    if kind not in ("convolution", "linear"):
        role = "vector" if kind in ("batch_norm", "group_norm") and layer.parameters % output_shape[1] == 0 else "free"
        each = output_shape[1] if role == "vector" else layer.parameters
        return tuple(
            Weight(name=f"weight{i}", shape=(each,), role=role, trainable=True)  # type: ignore[arg-type]
            for i in range(layer.parameters // each)
        )
    kernel = layer.window.kernel if layer.window is not None else ()
    is_transposed = layer.window is not None and layer.window.transposed
    first, second = (input_shape, output_shape) if is_transposed else (output_shape, input_shape)
    sides = (first[1], second[1] // layer.groups)
    weight = Weight(name="weight", shape=(*sides, *kernel), role="kernel", trainable=True)
    bias = Weight(name="bias", shape=(output_shape[1],), role="vector", trainable=True)
    return (weight, bias) if layer.parameters > prod(weight.shape) else (weight,)
