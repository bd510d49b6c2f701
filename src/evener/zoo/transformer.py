"""A Transformer encoder of any depth (Vaswani et al. 2017), normalised before each part, between its two tables."""

from __future__ import annotations

from evener.errors import require
from evener.graph import ModelGraph
from evener.zoo.sketch import Flow, Sketch


def transformer(
    layers: int = 24, width: int = 1024, heads: int = 16, feed: int = 4096, tokens: int = 512, words: int = 32_000
) -> ModelGraph:
    """A Transformer of `layers` encoder layers on sentences of `tokens` words, about 12 layers width^2 parameters.

    Raises:
        InvalidValue: `heads` does not divide `width`.
    """
    require(width % heads == 0, "heads", heads, f"a divisor of the width {width}")
    net = Sketch(f"transformer({layers},{width})")
    x = net.embed(net.input(tokens), "embed", words, width)
    for i in range(layers):
        x = _layer(net, x, f"layers.{i}", heads, feed)
    net.linear(net.layer_norm(x, "norm"), "decode", words)
    return net.graph()


def _layer(net: Sketch, x: Flow, name: str, heads: int, feed: int) -> Flow:
    y = net.attention(net.layer_norm(x, f"{name}.norm1"), f"{name}.attention", heads)
    x = net.join((x, y), f"{name}.sum1", "Sum", x.shape)
    y = net.relu(net.linear(net.layer_norm(x, f"{name}.norm2"), f"{name}.linear1", feed), f"{name}.relu")
    y = net.linear(y, f"{name}.linear2", x.shape[-1])
    return net.join((x, y), f"{name}.sum2", "Sum", x.shape)
