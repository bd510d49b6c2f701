"""ModelGraph: the layers of a model, per sample; made by `trace`, read by the oracle."""

from __future__ import annotations

import math
from typing import Literal

from evener.records.errors import require, require_not_negative
from evener.records.schema import Noun, Part

Dim = Literal["sample", "channel", "filter", "row", "column"]


class Window(Part, frozen=True, kw_only=True):
    """The window of a convolution or pooling: output row o reads input rows [o*stride - padding, ... + extent).

    A transposed one writes instead: input row i adds to output rows [i*stride - padding, ... + extent).

    Attributes:
        kernel, stride, padding, dilation: one number for each extent dim: rows, columns (depth, rows, columns in 3-D).
        transposed: whether it is the window of a transposed convolution.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        for field, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            sizes = getattr(self, field)
            ok = len(sizes) == len(self.kernel) > 0 and min(sizes) >= least
            require(ok, field, sizes, f"a size of at least {least} for each extent dim")

    @property
    def extent(self) -> tuple[int, ...]:
        """Rows, columns ... from the first to the last that one window reads."""
        return tuple(dilation * (kernel - 1) + 1 for kernel, dilation in zip(self.kernel, self.dilation, strict=True))

    @property
    def halo(self) -> tuple[int, int]:
        """Rows above and below input rows [a*stride, b*stride) that output rows [a, b) also read."""
        return self.padding[0], max(0, self.extent[0] - self.stride[0] - self.padding[0])

    def resize(self, sizes: tuple[int, ...], ceil: bool = False) -> tuple[int, ...]:
        """Return the output's rows, columns ... for those of the input; `ceil` counts a window that ends outside."""
        if self.transposed:
            grown = zip(sizes, self.extent, self.stride, self.padding, strict=True)
            return tuple((size - 1) * stride - 2 * before + extent for size, extent, stride, before in grown)
        moves = zip(sizes, self.extent, self.stride, self.padding, strict=True)
        return tuple(
            (size + 2 * before - extent + (stride - 1) * ceil) // stride + 1 for size, extent, stride, before in moves
        )


class Layer(Part, frozen=True, kw_only=True):
    """One layer, in the order of execution.

    Attributes:
        name: dotted module name, unique in the graph.
        kind: class of the module, such as `Conv2d`.
        output_shape: shape of one sample's output, without the sample dim, such as (C, H, W).
        parameters: number of trainable scalars of this layer (shared ones are counted at their first layer).
        forward_flops: floating-point operations of the forward pass per sample (a multiply-add counts two).
        activation_bytes: bytes per sample stored for the backward pass.
        splits: dims along which the layer's work can be divided.
        inputs: names of the layers whose outputs this one reads; empty for the first.
        input_shape: shape of one sample's input; empty where it is not known.
        window: window of a convolution or pooling; None for other layers.
        groups: groups of a grouped convolution.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int = 0
    forward_flops: float = 0.0
    activation_bytes: int = 0
    splits: tuple[Dim, ...] = ("sample",)
    inputs: tuple[str, ...] = ()
    input_shape: tuple[int, ...] = ()
    window: Window | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        require(bool(self.name), "name", self.name, "a non-empty string")
        require_not_negative(self, "parameters", "forward_flops", "activation_bytes")
        require(all(n >= 0 for n in self.output_shape), "output_shape", self.output_shape, "sizes of zero or more")
        require(all(n >= 0 for n in self.input_shape), "input_shape", self.input_shape, "sizes of zero or more")
        require(self.groups > 0, "groups", self.groups, "positive")

    @property
    def has_weights(self) -> bool:
        """Whether the layer multiplies by weights that channels and filters divide."""
        return "filter" in self.splits

    @property
    def filters(self) -> int:
        """Output features F: channels of a convolution's output, the last dim of a linear layer's."""
        return _features(self.output_shape, images=self.window is not None)

    @property
    def channels(self) -> int:
        """Input features C, counted like `filters`."""
        return _features(self.input_shape, images=self.window is not None)

    @property
    def bias(self) -> int:
        """Parameters of a weighted layer that a division of its channels leaves whole."""
        kernel = math.prod(self.window.kernel) if self.window else 1
        return max(0, self.parameters - self.filters * self.channels * kernel // self.groups) if self.has_weights else 0

    @property
    def output_size(self) -> int:
        """Elements of one sample's output."""
        return math.prod(self.output_shape) if self.output_shape else 0

    @property
    def input_size(self) -> int:
        """Elements of one sample's input."""
        return math.prod(self.input_shape) if self.input_shape else 0


def _features(shape: tuple[int, ...], images: bool) -> int:
    """Return the size of the dim that holds features; 0 for an unknown shape."""
    return (shape[0] if images else shape[-1]) if shape else 0


class ModelGraph(Noun, frozen=True, kw_only=True):
    """A model as its layers in order of execution.

    Attributes:
        name: name of the model.
        layers: layers in order; every input names an earlier layer.
        element_bytes: bytes of one parameter and one activation (4 for float32).
        buffer_bytes: bytes of state that is not trained (running statistics).
    """

    name: str
    layers: tuple[Layer, ...]
    element_bytes: int = 4
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        require(bool(self.layers), "layers", self.layers, "at least one layer")
        require(self.element_bytes in (1, 2, 4, 8), "element_bytes", self.element_bytes, "1, 2, 4 or 8")
        require(self.buffer_bytes >= 0, "buffer_bytes", self.buffer_bytes, "zero or more")
        seen: set[str] = set()
        for layer in self.layers:
            require(layer.name not in seen, "layers", layer.name, "layers of different names")
            for name in layer.inputs:
                require(name in seen, f"inputs of layer {layer.name}", name, "names of earlier layers")
            seen.add(layer.name)

    @property
    def by_name(self) -> dict[str, Layer]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    @property
    def parameters(self) -> int:
        """Number of trainable scalars."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all trainable scalars."""
        return self.parameters * self.element_bytes

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of one sample's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes per sample stored for the backward pass."""
        return sum(layer.activation_bytes for layer in self.layers)
