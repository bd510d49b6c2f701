"""A network on volumes: CosmoFlow (Mathuriya et al. 2018), in the size of the MLPerf HPC benchmark."""

from __future__ import annotations

from evener.graph import ModelGraph
from evener.zoo.sketch import Sketch


def cosmoflow(volume: tuple[int, int, int, int] = (4, 128, 128, 128), outputs: int = 4) -> ModelGraph:
    """CosmoFlow: five 3-D convolutions, each followed by a pooling, and three linear layers; 8.9 M parameters at 128^3.

    Few parameters and very large activations: a volume of 512^3 is what spatial parallelism is for.
    """
    net = Sketch("cosmoflow")
    x = net.input(*volume)
    for i in range(5):
        x = net.smooth(net.conv(x, f"conv{i + 1}", 32 << i, 3, 1, 1), f"act{i + 1}", "LeakyReLU")
        x = net.pool(x, f"pool{i + 1}", 2, 2)
    x = net.flatten(x)
    for i, features in enumerate((128, 64), start=1):
        x = net.smooth(net.linear(x, f"linear{i}", features), f"act{5 + i}", "LeakyReLU")
        x = net.dropout(x, f"dropout{i}")
    net.linear(x, "linear3", outputs)
    return net.graph()
