"""Builds a ModelGraph layer by layer, without PyTorch; the zoo's networks are written with it.

A `Flow` is a tensor between layers, with its shape per sample and the number of its storage: a storage that backward
needs twice is kept once (an in-place activation keeps the output of its normalisation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from evener.records.graph import Dim, Layer, ModelGraph, Window

_POINTWISE: tuple[Dim, ...] = ("sample", "channel", "row", "column")
_WEIGHTED: tuple[Dim, ...] = ("sample", "channel", "filter")


class Flow(NamedTuple):
    """A tensor between layers.

    Attributes:
        origins: names of the layers that produced it.
        shape: shape of one sample.
        storage: number of the memory that holds it.
    """

    origins: tuple[str, ...]
    shape: tuple[int, ...]
    storage: int


class Sketch:
    """A ModelGraph under construction; every method adds one layer and returns its output.

    Args:
        name: name of the model.
        element_bytes: bytes of a parameter and of an activation.
    """

    def __init__(self, name: str, element_bytes: int = 4) -> None:
        self.name = name
        self.element_bytes = element_bytes
        self._layers: dict[str, Layer] = {}
        self._kept: set[int] = set()
        self._storages = 0
        self._buffer_bytes = 0

    def graph(self) -> ModelGraph:
        """Return the model graph."""
        return ModelGraph(
            name=self.name,
            layers=tuple(self._layers.values()),
            element_bytes=self.element_bytes,
            buffer_bytes=self._buffer_bytes,
        )

    def input(self, *shape: int) -> Flow:
        """Add the samples, of `shape` each."""
        return Flow((), shape, self._new_storage())

    def conv(
        self,
        x: Flow,
        name: str,
        filters: int,
        kernel: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        bias: bool = True,
        transposed: bool = False,
    ) -> Flow:
        """Add a convolution of 2 or 3 extent dims, by the shape of `x`; it keeps its input."""
        window = _window(len(x.shape) - 1, kernel, stride, padding, transposed)
        extent = window.resize(x.shape[1:])
        weights = x.shape[0] * filters * math.prod(window.kernel)
        positions = math.prod(x.shape[1:] if transposed else extent)
        splits: tuple[Dim, ...] = _WEIGHTED if transposed else (*_WEIGHTED, "row", "column")
        kind = f"Conv{'Transpose' if transposed else ''}{len(extent)}d"
        flops = 2.0 * weights * positions
        weighted = weights + filters * bias
        return self._add(x, name, kind, (filters, *extent), weighted, flops, self._keep(x), splits, window)

    def norm(self, x: Flow, name: str) -> Flow:
        """Add a BatchNorm; it keeps its input, and has two statistics a channel as buffers, with a 64-bit counter."""
        channels = x.shape[0]
        self._buffer_bytes += 2 * channels * self.element_bytes + 8
        return self._add(x, name, f"BatchNorm{len(x.shape) - 1}d", x.shape, 2 * channels, kept_bytes=self._keep(x))

    def layer_norm(self, x: Flow, name: str) -> Flow:
        """Add a LayerNorm over the last dim; it keeps its input and two statistics a token."""
        statistics = 2 * math.prod(x.shape[:-1]) * self.element_bytes
        kept_bytes = self._keep(x) + statistics
        return self._add(x, name, "LayerNorm", x.shape, 2 * x.shape[-1], kept_bytes=kept_bytes, splits=("sample",))

    def relu(self, x: Flow, name: str, in_place: bool = True) -> Flow:
        """Add a ReLU; it keeps its output, which an in-place ReLU stores in its input's memory."""
        y = x if in_place else x._replace(storage=self._new_storage())
        out = self._add(x, name, "ReLU", x.shape, kept_bytes=self._keep(y))
        return out._replace(storage=y.storage)

    def smooth(self, x: Flow, name: str, kind: str = "SiLU") -> Flow:
        """Add an activation whose derivative needs its input; it keeps its input."""
        return self._add(x, name, kind, x.shape, kept_bytes=self._keep(x))

    def pool(
        self,
        x: Flow,
        name: str,
        kernel: int,
        stride: int,
        padding: int = 0,
        kind: str = "MaxPool",
        ceil: bool = False,
    ) -> Flow:
        """Add a pooling; it keeps its input, and for a maximum its position (64 bits each)."""
        window = _window(len(x.shape) - 1, kernel, stride, padding)
        shape = (x.shape[0], *window.resize(x.shape[1:], ceil))
        indices = 8 * math.prod(shape) if kind == "MaxPool" else 0
        kept_bytes = self._keep(x) + indices
        return self._add(x, name, f"{kind}{len(shape) - 1}d", shape, kept_bytes=kept_bytes, window=window)

    def average(self, x: Flow, name: str, size: int = 1) -> Flow:
        """Add an adaptive average pooling to `size` in each extent dim; size 1 is a mean, which keeps nothing."""
        shape = (x.shape[0], *(size for _ in x.shape[1:]))
        kept_bytes = 0 if size == 1 else self._keep(x)
        kind = f"AdaptiveAvgPool{len(shape) - 1}d"
        return self._add(x, name, kind, shape, kept_bytes=kept_bytes, splits=("sample", "channel"))

    def upsample(self, x: Flow, name: str, factor: int = 2) -> Flow:
        """Add an enlargement by repetition; it keeps nothing."""
        shape = (x.shape[0], *(factor * size for size in x.shape[1:]))
        return self._add(x, name, "Upsample", shape, splits=("sample",))

    def dropout(self, x: Flow, name: str) -> Flow:
        """Add a Dropout; it keeps its mask."""
        return self._add(x, name, "Dropout", x.shape, kept_bytes=self._bytes(x.shape))

    def linear(self, x: Flow, name: str, features: int) -> Flow:
        """Add a Linear layer over the last dim; it keeps its input."""
        weights = x.shape[-1] * features
        flops = 2.0 * weights * math.prod(x.shape[:-1])
        shape = (*x.shape[:-1], features)
        return self._add(x, name, "Linear", shape, weights + features, flops, self._keep(x), _WEIGHTED)

    def attention(self, x: Flow, name: str, heads: int) -> Flow:
        """Add self-attention of `heads` heads: four projections and two products of tokens with tokens.

        It keeps its input, queries, keys and values, the weights of all heads, and the last projection's input.
        """
        tokens, width = x.shape
        parameters = 4 * width * (width + 1)
        flops = 8.0 * tokens * width**2 + 4.0 * tokens**2 * width
        kept_bytes = self._keep(x) + (4 * tokens * width + heads * tokens**2) * self.element_bytes
        return self._add(x, name, "MultiheadAttention", x.shape, parameters, flops, kept_bytes, ("sample",))

    def embed(self, x: Flow, name: str, words: int, width: int) -> Flow:
        """Add a table of `words` vectors; `x` holds 64-bit numbers of words."""
        kept_bytes = 8 * math.prod(x.shape)
        return self._add(
            x, name, "Embedding", (*x.shape, width), words * width, kept_bytes=kept_bytes, splits=("sample",)
        )

    def join(self, flows: Iterable[Flow], name: str, kind: str, shape: tuple[int, ...]) -> Flow:
        """Add a sum or concatenation that several layers read, as a layer without work, so that one tensor crosses a
        cut.
        """
        parts = tuple(flows)
        return self._add(self._merge(parts, shape), name, kind, shape, splits=("sample",), known=False)

    def add(self, *flows: Flow) -> Flow:
        """Return the sum of `flows`, written into the first; it is no layer of its own, and its one reader reads all of
        them.
        """
        return self._merge(flows, flows[0].shape)._replace(storage=flows[0].storage)

    def concat(self, *flows: Flow) -> Flow:
        """Return the channels of `flows`, concatenated; it is no layer of its own."""
        return self._merge(flows, (sum(flow.shape[0] for flow in flows), *flows[0].shape[1:]))

    def flatten(self, x: Flow) -> Flow:
        """Return `x` as one dim, in the same memory; it is no layer."""
        return x._replace(shape=(math.prod(x.shape),))

    def part(self, x: Flow, channels: int) -> Flow:
        """Return the first `channels` of `x`: a view of the same memory."""
        return x._replace(shape=(channels, *x.shape[1:]))

    def _merge(self, flows: Iterable[Flow], shape: tuple[int, ...]) -> Flow:
        origins = {origin for flow in flows for origin in flow.origins}
        return Flow(tuple(name for name in self._layers if name in origins), shape, self._new_storage())

    def _add(
        self,
        x: Flow,
        name: str,
        kind: str,
        shape: tuple[int, ...],
        parameters: int = 0,
        flops: float = 0.0,
        kept_bytes: int = 0,
        splits: tuple[Dim, ...] = _POINTWISE,
        window: Window | None = None,
        known: bool = True,
    ) -> Flow:
        unique = self._unique(name)
        self._layers[unique] = Layer(
            name=unique,
            kind=kind,
            output_shape=shape,
            parameters=parameters,
            forward_flops=flops,
            activation_bytes=kept_bytes,
            splits=splits if len(shape) > 2 else tuple(dim for dim in splits if dim not in ("row", "column")),
            inputs=x.origins,
            input_shape=x.shape if known else (),
            window=window,
        )
        return Flow((unique,), shape, self._new_storage())

    def _unique(self, name: str) -> str:
        """Return `name`, with a number from its second use on, like the names that `trace` gives."""
        calls = 1
        while (f"{name}#{calls}" if calls > 1 else name) in self._layers:
            calls += 1
        return f"{name}#{calls}" if calls > 1 else name

    def _new_storage(self) -> int:
        self._storages += 1
        return self._storages

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.element_bytes

    def _keep(self, x: Flow) -> int:
        """Return the bytes of `x` that backward needs and that are not kept yet."""
        if x.storage in self._kept:
            return 0
        self._kept.add(x.storage)
        return self._bytes(x.shape)


def _window(
    dims: int,
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...],
    padding: int | tuple[int, ...],
    transposed: bool = False,
) -> Window:
    return Window(
        kernel=_sizes(kernel, dims),
        stride=_sizes(stride, dims),
        padding=_sizes(padding, dims),
        dilation=(1,) * dims,
        transposed=transposed,
    )


def _sizes(size: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (size,) * dims if isinstance(size, int) else size
