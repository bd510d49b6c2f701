"""A ModelGraph as the network of operations that `oracle.division` divides.

Values have one sample, with features in dim 1: (1, C, H, W), a volume's columns counted together; (1, F) or (1, F,
tokens). Operations that a graph omits are added: the sum or concatenation in front of a layer with several inputs, and
the operation that flattens, slices or reshapes a value before the layer that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Adaptive, Kind, Network, Operation, Sliding, Spreading, Weight, WindowRule
from evener.records.graph import Layer, ModelGraph

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
