"""How layers are divided, and the bytes that this moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.apportion import apportion, by_shares, weights_to_workers
from evener.oracle.cost.layers import columns
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.cost.partition import MODES, DividedLayers, ModelSplit
from evener.oracle.division.layout import Replica
from evener.oracle.division.rules import DivisionName
from evener.oracle.hypothetical_cluster import hypothetical_profile
from evener.oracle.zoo.networks import draw
from evener.oracle.zoo.sketch import Sketch
from evener.records.graph import ModelGraph
from support.imagined_machines import convolutions

GRAPH = convolutions(depth=3, width=16, rows=8, norm=True)
NAMES = [layer.name for layer in GRAPH.layers]
IMAGE = 4 * 16 * 8 * 8


def divided(mode: DivisionName, shares: list[float], graph: ModelGraph = GRAPH, published: bool = False) -> ModelSplit:
    layers = DividedLayers(columns(graph), mode, len(shares), published)
    return layers.among(Replica(shares=tuple(shares)))


def names(flags: np.ndarray) -> set[str]:
    return {name for name, flag in zip(NAMES, flags, strict=True) if flag}


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_units_are_divided_as_by_apportion(size: int, shares: list[float]) -> None:
    by_hand = by_shares(size, tuple(shares))
    assert sum(by_hand) == size
    workers = weights_to_workers(shares, [None] * len(shares))
    expected = apportion(size, workers)
    slowest = [max(n / share for n, share in zip(units, shares, strict=True)) for units in (by_hand, expected)]
    assert slowest[0] == pytest.approx(slowest[1])


@pytest.mark.parametrize("mode", MODES)
@given(shares=st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_the_parts_of_all_ranks_cover_the_layer(mode: DivisionName, shares: list[float]) -> None:
    split = divided(mode, shares)
    layers = split.layers
    for flags, field in (
        (layers.by_filter, "filters"),
        (layers.by_channel, "channels"),
        (layers.by_rows | layers.follows, "rows"),
    ):
        total = getattr(split.parts, field).sum(axis=0)
        assert total[flags] == pytest.approx(1.0)
    assert sum(split.shares) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["filter", "channel", "hybrid", "sharded"])
def test_divided_weights_have_no_duplicates(mode: DivisionName) -> None:
    graph = draw("vgg16", {"image": "3x32x32"})
    layers, split = columns(graph), divided(mode, [3.0, 2.0, 1.0], graph)
    held = split.parameter_bytes.sum(axis=0)
    undivided = ~(split.layers.by_filter | split.layers.by_channel) & layers.is_weighted
    expected = layers.weight_bytes + 2 * (layers.weight_bytes * undivided + layers.bias_bytes * split.layers.by_channel)
    assert held[layers.is_weighted] == pytest.approx(expected[layers.is_weighted])


def test_filter_gathers_outputs_and_reduces_gradients_of_inputs() -> None:
    split = divided("filter", [1, 1])
    assert names(split.layers.by_filter) == {"conv0", "conv1", "conv2", "head"}
    assert split.forward.nbytes[NAMES.index("norm1")] == IMAGE / 2  # what reads conv1's output gathers it
    assert split.backward.nbytes[NAMES.index("conv1")] == 2 * IMAGE / 2
    assert split.backward.nbytes[NAMES.index("conv0")] == 0  # the samples have no gradient


def test_channel_reduces_outputs_and_gathers_gradients_of_inputs() -> None:
    split = divided("channel", [1, 1, 1, 1])
    assert names(split.layers.by_channel) == {"conv0", "conv1", "conv2", "head"}
    assert split.forward.nbytes[NAMES.index("norm2")] == 2 * 3 * IMAGE / 4
    assert split.backward.nbytes[NAMES.index("conv2")] == 3 * IMAGE / 4


def test_hybrid_divides_filters_where_there_are_too_few_channels() -> None:
    layers = divided("hybrid", [1, 1, 1, 1]).layers
    assert names(layers.by_filter) == {"conv0"}
    assert names(layers.by_channel) == {"conv1", "conv2", "head"}


def test_layers_are_divided_equally_if_all_are_wide_enough() -> None:
    graph = convolutions(depth=4, width=12, rows=4)
    job = TrainingJob(graph=graph, batch_size=8)
    cases: tuple[tuple[bool, DivisionName], ...] = ((False, "hybrid"), (True, "channel"), (True, "hybrid"))
    for published, mode in cases:
        planned = CostModel(replace(job, published=published), hypothetical_profile("2xv100-node"))
        for size in range(2, 16):
            shares = [1.0] * size
            found, expected = planned.divide(mode, shares), divided(mode, shares, graph, published)
            assert found.sent_bytes.tolist() == expected.sent_bytes.tolist()
            assert found.parameter_bytes.tolist() == expected.parameter_bytes.tolist()


def test_published_divisions_do_not_divide_linear_or_narrow_layers() -> None:
    assert names(divided("filter", [1, 1], published=True).layers.by_filter) == {"conv0", "conv1", "conv2"}
    assert names(divided("channel", [1] * 4, published=True).layers.by_channel) == {"conv1", "conv2"}


def test_sharded_moves_only_the_narrower_side() -> None:
    net = Sketch("bottleneck")
    x = net.relu(net.conv(net.input(64, 8, 8), "first", 64, 1, bias=False), "relu0")
    x = net.relu(net.norm(net.conv(x, "narrow", 16, 1, bias=False), "norm1"), "relu1")
    x = net.relu(net.norm(net.conv(x, "middle", 16, 3, 1, 1, bias=False), "norm2"), "relu2")
    x = net.relu(net.norm(net.conv(x, "wide", 64, 1, bias=False), "norm3"), "relu3")
    net.conv(x, "next", 128, 1, bias=False)
    graph = net.graph()
    order = [layer.name for layer in graph.layers]
    split = divided("sharded", [1, 1], graph)
    narrow = 4 * 16 * 8 * 8
    moved = dict(zip(order, zip(split.forward.nbytes, split.backward.nbytes, strict=True), strict=True))
    assert moved["norm1"] == moved["middle"] == moved["wide"] == (narrow / 2, narrow / 2)
    assert all(moved[name] == (0, 0) for name in ("narrow", "norm2", "norm3", "relu1", "relu2", "relu3"))
    follows = {name for name, flag in zip(order, split.layers.follows, strict=True) if flag}
    assert follows == set(order) - {"first", "narrow", "middle", "wide", "next"}


def test_sharded_sends_at_most_two_fifths_of_filter_for_resnet152() -> None:
    graph = draw("resnet152", {"image": "3x64x64"})
    for size in (2, 4):
        own, published = (divided(mode, [1.0] * size, graph).sent_bytes.max() for mode in ("sharded", "filter"))
        assert own <= 0.4 * published


def test_row_division_ends_at_layers_that_rows_cannot_divide() -> None:
    graph = draw("vgg16", {"image": "3x64x64"})
    order = [layer.name for layer in graph.layers]
    split = divided("spatial", [1.0] * 5, graph)
    last = order.index("features.30")
    assert split.layers.by_rows[last]  # two rows for five ranks: three of them have none
    assert split.parts.rows[:, last].tolist().count(0) == 3


def test_gradient_read_by_two_layers_is_exchanged_once_unless_published() -> None:
    net = Sketch("fork")
    x = net.relu(net.conv(net.input(8, 4, 4), "stem", 8, 1, bias=False), "relu")
    net.add(net.conv(x, "left", 8, 1, bias=False), net.conv(x, "right", 8, 1, bias=False))
    own, published = (divided("filter", [1, 1], net.graph(), published=flag) for flag in (False, True))
    size = 4 * 8 * 4 * 4
    assert own.backward.nbytes.tolist() == [0, 0, size, 0]
    assert published.backward.nbytes.tolist() == [0, 0, size, size]


def test_halo_of_a_3x3_window_is_one_row_on_either_side() -> None:
    received = divided("spatial", [1, 1, 1, 1]).forward.nbytes
    assert received[NAMES.index("conv1")] == 2 * 4 * 16 * 8
    assert received[NAMES.index("conv0")] == received[NAMES.index("norm1")] == 0


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_a_faster_rank_never_gets_less(shares: list[float]) -> None:
    units = by_shares(97, tuple(shares))
    ordered = sorted(zip(shares, units, strict=True))
    assert all(a[1] <= b[1] or a[0] == b[0] for a, b in pairwise(ordered))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([2.0, 0.5, 8.0]))
def test_only_ratios_of_speeds_matter(shares: list[int], factor: float) -> None:
    assert by_shares(64, tuple(map(float, shares))) == by_shares(64, tuple(share * factor for share in shares))
