"""A ModelGraph as columns of numbers, one row a layer, over which the oracle computes its sums.

The number of reads and writes in a pass depends on the kind of layer, in multiples of its input and output size:

    kind                    forward: input, output    backward: input, output
    convolution, linear     1  1 (a bias: 3)          2  2 (a bias: 3)      gradients of the input and of the weights
    BatchNorm               2  1                      3  2                  statistics first, then the values
    maximum pooling         1  3                      1  3                  the positions of maxima are 64 bits each
    all other layers        1  1                      1  2                  at least the bytes kept for backward

A residual sum in front of a layer reads all terms and writes their sum; a concatenation reads and writes its parts.
Where several layers read a tensor, their gradients are added: two reads and a write for each additional reader.
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
        graph: the model graph.
        element_bytes: bytes of one activation value.
        forward_flops, backward_flops: FLOPs of each pass.
        forward_in, forward_out, backward_in, backward_out: bytes that a pass moves for its input and for its output.
        input_bytes, output_bytes: sizes of the tensors.
        weight_bytes, bias_bytes: size of all parameters, and of those that a division by channel does not divide.
        kept_bytes: bytes kept for the backward pass.
        halo_bytes: bytes that a rank of a division by rows receives from both neighbours together.
        channels, filters: sizes of the dims that can be divided; 0 where none can.
        taps: weights of a filter for each channel.
        is_weighted, is_convolution: kind of the layer.
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
        """Bytes of one sample that cross the cut behind each layer: outputs that later layers read."""
        index_of = {layer.name: index for index, layer in enumerate(self.graph.layers)}
        last_reader = np.arange(len(self))
        for index, layer in enumerate(self.graph.layers):
            for name in layer.inputs:
                last_reader[index_of[name]] = index
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
    """Return the columns of `graph`.

    Args:
        graph: the model.
        element_bytes: bytes of one activation value; by default those of a parameter.
    """
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


def _row(layer: Layer, inputs: list[Layer], readers: int, size: int, weight_size: int) -> dict[str, float | int | bool]:
    """Return the numbers of one layer, with activations of `size` bytes and parameters of `weight_size` bytes."""
    sources = sum(source.output_size for source in inputs)
    num_inputs, num_outputs = layer.input_size or sources, layer.output_size
    passes = _passes(layer)
    forward = passes.forward_in * num_inputs + passes.forward_out * num_outputs + _joining(layer, inputs, sources)
    backward = (
        passes.backward_in * num_inputs + passes.backward_out * num_outputs + 3 * max(0, readers - 1) * num_outputs
    )
    kept_bytes = layer.activation_bytes * size / weight_size
    minimum = 0 if layer.has_weights else 2 * kept_bytes
    return {
        "forward_flops": float(layer.forward_flops),
        "backward_flops": float(layer.forward_flops * (2 if inputs or not layer.has_weights else 1)),
        "forward_in": float(max(forward * size, minimum) - passes.forward_out * num_outputs * size),
        "forward_out": float(passes.forward_out * num_outputs * size),
        "backward_in": float(passes.backward_in * num_inputs * size),
        "backward_out": float(max(backward * size, minimum) - passes.backward_in * num_inputs * size),
        "input_bytes": float(num_inputs * size),
        "output_bytes": float(num_outputs * size),
        "weight_bytes": float(layer.parameters * weight_size),
        "bias_bytes": float(layer.bias * weight_size),
        "kept_bytes": kept_bytes,
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
    """Return the elements moved to add or concatenate the layer's inputs, where no other layer does that."""
    if len(inputs) < 2 or not layer.input_size:
        return 0
    if sources == layer.input_size:
        return 2 * sources
    return 3 * (len(inputs) - 1) * layer.input_size


def _halo_size(layer: Layer) -> int:
    """Return the number of elements of input rows beyond its own strip that a strip's windows read."""
    if layer.window is None or "row" not in layer.splits or not layer.input_shape:
        return 0
    return sum(layer.window.halo) * (layer.input_size // layer.input_shape[1])
