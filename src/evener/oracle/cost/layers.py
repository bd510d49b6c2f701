"""A ModelGraph as columns of numbers, one row a layer: what the oracle's sums over layers run on.

How often a pass reads or writes its tensors is counted by kind of layer, in multiples of its input and its output:

    kind                    forward: input, output    backward: input, output
    convolution, linear     1  1 (a bias: 3)          2  2 (a bias: 3)      gradients of the input and of the weights
    BatchNorm               2  1                      3  2                  statistics first, then the values
    maximum pooling         1  3                      1  3                  the places of maxima are 64 bits each
    anything else           1  1                      1  2                  but no less than what is kept for backward

A residual sum in front of a layer reads all its terms and writes their sum; a concatenation reads and writes its parts.
Where several layers read a tensor, their gradients for it are added up: two reads and a write for each further one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evener.records.graph import Layer, ModelGraph

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Columns of a model; FLOPs and bytes are those of one sample.

    Attributes:
        graph: that they were read from.
        element_bytes: of an activation.
        forward_flops, backward_flops: of each pass.
        forward_in, forward_out, backward_in, backward_out: bytes that a pass moves for its input and for its output.
        input_bytes, output_bytes: of the tensors.
        weight_bytes, bias_bytes: of all parameters; of those that a division of channels leaves whole.
        kept_bytes: for the backward pass.
        halo_bytes: that a rank of a division by rows receives from both neighbours together.
        channels, filters: sizes of what can be divided; 0 where nothing can.
        taps: weights that a filter has for each channel.
        is_weighted, is_convolution: kinds.
    """

    graph: ModelGraph
    element_bytes: int
    forward_flops: Numbers
    backward_flops: Numbers
    forward_in: Numbers
    forward_out: Numbers
    backward_in: Numbers
    backward_out: Numbers
    input_bytes: Numbers
    output_bytes: Numbers
    weight_bytes: Numbers
    bias_bytes: Numbers
    kept_bytes: Numbers
    halo_bytes: Numbers
    channels: Counts
    filters: Counts
    taps: Counts
    is_weighted: Flags
    is_convolution: Flags

    def __len__(self) -> int:
        return len(self.graph.layers)

    @cached_property
    def boundary_bytes(self) -> Numbers:
        """Bytes of one sample that live across the cut behind every layer: outputs that later layers read."""
        place = {layer.name: index for index, layer in enumerate(self.graph.layers)}
        last_reader = np.arange(len(self))
        for index, layer in enumerate(self.graph.layers):
            for name in layer.inputs:
                last_reader[place[name]] = index
        crossing = np.zeros(len(self) + 1)
        np.add.at(crossing, np.arange(len(self)), self.output_bytes)
        np.add.at(crossing, last_reader, -self.output_bytes)
        return np.cumsum(crossing)[:-1]


class _Passes(NamedTuple):
    """Reads and writes of a layer's own input and output."""

    forward_in: int
    forward_out: int
    backward_in: int
    backward_out: int


@lru_cache(maxsize=16)
def columns(graph: ModelGraph, element_bytes: int | None = None) -> Layers:
    """The columns of `graph`, with activations of `element_bytes` a number; by default as large as its parameters."""
    size = element_bytes or graph.element_bytes
    by_name = graph.by_name
    readers = dict.fromkeys(by_name, 0)
    for layer in graph.layers:
        for name in layer.inputs:
            readers[name] += 1
    rows = [
        _row(layer, [by_name[name] for name in layer.inputs], readers[layer.name], size, graph.element_bytes)
        for layer in graph.layers
    ]
    names = [field.name for field in fields(Layers) if field.type in ("Numbers", "Counts", "Flags")]
    return Layers(graph=graph, element_bytes=size, **{name: np.array([row[name] for row in rows]) for name in names})


def _row(layer: Layer, inputs: list[Layer], readers: int, size: int, own: int) -> dict[str, float | int | bool]:
    """The numbers of one layer: activations of `size` bytes, parameters of `own`."""
    sources = sum(one.output_size for one in inputs)
    taken, given = layer.input_size or sources, layer.output_size
    passes = _passes(layer)
    forward = passes.forward_in * taken + passes.forward_out * given + _joining(layer, inputs, sources)
    backward = passes.backward_in * taken + passes.backward_out * given + 3 * max(0, readers - 1) * given
    kept = layer.activation_bytes * size / own
    least = 0 if layer.has_weights else 2 * kept
    return {
        "forward_flops": float(layer.forward_flops),
        "backward_flops": float(layer.forward_flops * (2 if inputs or not layer.has_weights else 1)),
        "forward_in": float(max(forward * size, least) - passes.forward_out * given * size),
        "forward_out": float(passes.forward_out * given * size),
        "backward_in": float(passes.backward_in * taken * size),
        "backward_out": float(max(backward * size, least) - passes.backward_in * taken * size),
        "input_bytes": float(taken * size),
        "output_bytes": float(given * size),
        "weight_bytes": float(layer.parameters * own),
        "bias_bytes": float(layer.bias * own),
        "kept_bytes": kept,
        "halo_bytes": float(_halo_size(layer) * size),
        "channels": layer.channels if layer.has_weights else 0,
        "filters": layer.filters if layer.has_weights else 0,
        "taps": prod(layer.window.kernel) if layer.window else 1,
        "is_weighted": layer.has_weights,
        "is_convolution": layer.kind.startswith("Conv"),
    }


def _passes(layer: Layer) -> _Passes:
    if layer.has_weights or layer.kind.startswith("Conv"):
        return _Passes(1, 3, 2, 3) if layer.bias else _Passes(1, 1, 2, 2)
    if "BatchNorm" in layer.kind:
        return _Passes(2, 1, 3, 2)
    if layer.kind.startswith("MaxPool"):
        return _Passes(1, 3, 1, 3)
    return _Passes(1, 1, 1, 2)


def _joining(layer: Layer, inputs: list[Layer], sources: int) -> int:
    """Elements moved to add up or to put together what the layer reads, where nothing else does that."""
    if len(inputs) < 2 or not layer.input_size:
        return 0
    if sources == layer.input_size:
        return 2 * sources
    return 3 * (len(inputs) - 1) * layer.input_size


def _halo_size(layer: Layer) -> int:
    """Elements of the input rows above and below its own that a strip's windows reach into."""
    if layer.window is None or "row" not in layer.splits or not layer.input_shape:
        return 0
    return sum(layer.window.halo) * (layer.input_size // layer.input_shape[1])
