"""AmoebaNet-D, found by evolution (Real et al. 2018), in the size that GPipe was measured with (Huang et al. 2019).

A cell takes the outputs of the last cell and of the one before as states 0 and 1. Five times it adds two operations on
earlier states to a new state. It returns some states, concatenated along the channels. For a normal cell, the paper
returns states 4, 5, 6, but the program that GPipe was measured with returns 0, 3, 4, 6. This module follows it,
which has the parameter counts of table 1 in Huang et al.
"""

from __future__ import annotations

from typing import NamedTuple

from evener.oracle.zoo.sketch import Flow, Sketch
from evener.records.errors import require
from evener.records.graph import ModelGraph


class Recipe(NamedTuple):
    """A kind of cell: pairs of (state, operation) to sum, and the states to return."""

    sums: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    returned: tuple[int, ...]


NORMAL = Recipe(
    sums=(
        ((1, "conv_1x1"), (1, "max_3x3")),
        ((1, "identity"), (0, "conv_1x7_7x1")),
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        ((2, "max_3x3"), (2, "identity")),
        ((1, "average_3x3"), (5, "conv_1x1")),
    ),
    returned=(0, 3, 4, 6),
)
REDUCTION = Recipe(
    sums=(
        ((0, "max_2x2"), (0, "max_3x3")),
        ((2, "identity"), (1, "conv_3x3")),
        ((2, "conv_1x7_7x1"), (2, "max_3x3")),
        ((3, "identity"), (1, "max_2x2")),
        ((2, "average_3x3"), (3, "conv_1x1")),
    ),
    returned=(4, 5, 6),
)


def amoebanet_d(
    layers: int = 18, filters: int = 256, image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000
) -> ModelGraph:
    """Return AmoebaNet-D of `layers` normal cells (a multiple of 3) and `filters` filters.

    Raises:
        InvalidValue: layers or filters do not divide as the network needs.
    """
    require(layers > 0 and layers % 3 == 0, "layers", layers, "a positive multiple of 3")
    require(filters > 0 and filters % 16 == 0, "filters", filters, "a positive multiple of 16")
    net = Sketch(f"amoebanet_d({layers},{filters})")
    width = filters // 4
    stem = net.conv(net.relu(net.input(*image), "stem.relu", in_place=False), "stem.conv", width, 3, 2, 1, bias=False)
    before = last = net.norm(stem, "stem.norm")
    for index, recipe in enumerate(cells(layers)):
        width *= 2 if recipe is REDUCTION else 1
        before, last = last, _cell(net, f"cell{index + 1}", recipe, before, last, width)
    net.linear(net.flatten(net.average(last, "pool")), "classifier", classes)
    return net.graph()


def cells(layers: int) -> list[Recipe]:
    """Return the cells of a network with `layers` normal cells, in order."""
    normal = [NORMAL] * (layers // 3)
    return [REDUCTION] * 2 + [*normal, REDUCTION] * 2 + normal


def _cell(net: Sketch, name: str, recipe: Recipe, before: Flow, last: Flow, width: int) -> Flow:
    """Add one cell; the older input is first reshaped to the size and width of the newer one."""
    stride, states = 2 if recipe is REDUCTION else 1, [_unit(net, f"{name}.fit0", last, width, 1)]
    if before.shape[1:] != last.shape[1:]:
        states.append(_halve(net, f"{name}.fit1", before, width))
    elif before.shape[0] != width:
        states.append(_unit(net, f"{name}.fit1", before, width, 1))
    else:
        states.append(before)
    for node, pair in enumerate(recipe.sums, start=2):
        parts = [
            _operation(net, f"{name}.{node}{side}.{what}", what, states[state], stride if state < 2 else 1)
            for side, (state, what) in zip("ab", pair, strict=True)
        ]
        states.append(net.join(parts, f"{name}.{node}", "Sum", parts[0].shape))
    outputs = [states[i] for i in recipe.returned]
    shape = (sum(flow.shape[0] for flow in outputs), *outputs[-1].shape[1:])
    return net.join(outputs, name, "Cell", shape)


def _operation(net: Sketch, name: str, what: str, x: Flow, stride: int) -> Flow:
    channels = x.shape[0]
    narrow = channels // 4
    match what:
        case "identity":
            return x if stride == 1 else _halve(net, name, x, channels)
        case "max_2x2":
            return net.pool(x, name, 2, stride)
        case "max_3x3":
            return net.pool(x, name, 3, stride, 1)
        case "average_3x3":
            return net.pool(x, name, 3, stride, 1, kind="AvgPool")
        case "conv_1x1":
            return _unit(net, name, x, channels, 1, stride)
        case "conv_3x3":
            x = _unit(net, f"{name}.1", x, narrow, 1)
            return _unit(net, f"{name}.3", _unit(net, f"{name}.2", x, narrow, 3, stride, 1), channels, 1)
        case _:
            x = _unit(net, f"{name}.1", x, narrow, 1)
            x = _unit(net, f"{name}.2", x, narrow, (1, 7), (1, stride), (0, 3))
            x = _unit(net, f"{name}.3", x, narrow, (7, 1), (stride, 1), (3, 0))
            return _unit(net, f"{name}.4", x, channels, 1)


def _unit(
    net: Sketch,
    name: str,
    x: Flow,
    filters: int,
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> Flow:
    """Add a ReLU, a convolution and a BatchNorm."""
    y = net.relu(x, f"{name}.relu", in_place=False)
    return net.norm(net.conv(y, f"{name}.conv", filters, kernel, stride, padding, bias=False), f"{name}.norm")


def _halve(net: Sketch, name: str, x: Flow, filters: int) -> Flow:
    """Halve rows and columns by two parallel 1x1 convolutions of stride 2, one of them shifted by a pixel."""
    y = net.relu(x, f"{name}.relu", in_place=False)
    halves = [net.conv(y, f"{name}.conv{i}", filters // 2, 1, 2, bias=False) for i in (1, 2)]
    return net.norm(net.concat(*halves), f"{name}.norm")
