"""The table of a model's layers, and what the whole model needs."""

from __future__ import annotations

from rich.table import Table

from evener.graph import Layer, ModelGraph
from evener.report.grid import Row, grid
from evener.report.text import human_bytes, human_count


def layers_table(graph: ModelGraph) -> Table:
    """Every layer of `graph` with its costs per sample; in the caption those of the whole model."""
    forward, kept = human_count(graph.forward_flops / 1e6), human_bytes(graph.activation_bytes)
    total = (
        f"{human_count(graph.parameters)} parameters ({human_bytes(graph.parameter_bytes)}); "
        f"per sample {forward} MFLOP forward, {kept} kept for backward"
    )
    return grid(
        f"Model: {graph.name}",
        ("layer", "kind", "output of a sample", ">parameters", ">MFLOP", ">kept", "can be split along"),
        [_row(layer) for layer in graph.layers],
        caption=total,
    )


def _row(layer: Layer) -> Row:
    return (
        layer.name,
        layer.kind,
        " x ".join(map(str, layer.output_shape)),
        human_count(layer.parameters),
        human_count(layer.forward_flops / 1e6),
        human_bytes(layer.activation_bytes),
        ", ".join(layer.splits),
    )
