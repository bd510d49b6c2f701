"""ModelGraph: what the model is, layer by layer, per sample; made by `trace`, read by the oracle."""

from __future__ import annotations

from typing import Literal

from evener.errors import require
from evener.noun import Noun, Part

Dim = Literal["sample", "channel", "filter", "row", "column"]


class Layer(Part, frozen=True, kw_only=True):
    """One layer, in the order of execution.

    Attributes:
        name: dotted module name, unique in the graph.
        kind: class of the module, such as `Conv2d`.
        output_shape: of one sample, without the sample dim, such as (C, H, W).
        parameters: number of trainable scalars that this layer owns (shared ones are counted at their first layer).
        forward_flops: floating-point operations of the forward pass per sample (a multiply-add counts two).
        activation_bytes: kept for the backward pass per sample.
        splits: dims along which the layer's work can be divided.
        halo: (rows, columns) that a row or column split needs from each neighbour.
        inputs: names of the layers whose outputs this one reads; empty for the first.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int = 0
    forward_flops: float = 0.0
    activation_bytes: int = 0
    splits: tuple[Dim, ...] = ("sample",)
    halo: tuple[int, int] = (0, 0)
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "name", self.name, "a non-empty string")
        require(self.parameters >= 0, "parameters", self.parameters, "zero or more")
        require(self.forward_flops >= 0, "forward_flops", self.forward_flops, "zero or more")
        require(self.activation_bytes >= 0, "activation_bytes", self.activation_bytes, "zero or more")
        require(all(n >= 0 for n in self.output_shape), "output_shape", self.output_shape, "sizes of zero or more")
        require(min(self.halo) >= 0, "halo", self.halo, "two sizes of zero or more")


class ModelGraph(Noun, frozen=True, kw_only=True):
    """A model as its layers in order of execution.

    Attributes:
        name: of the model.
        layers: in order; every input names an earlier layer.
        element_bytes: bytes of one parameter and one activation (4 for float32).
        buffer_bytes: of state that is not trained (running statistics).
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
        """Bytes per sample kept for the backward pass."""
        return sum(layer.activation_bytes for layer in self.layers)
