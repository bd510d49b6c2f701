"""How layers are divided, and which bytes that moves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.apportion import apportion, weights_to_workers
from evener.oracle.cost.layers import columns
from evener.oracle.cost.partition import MODES, Mode, divide_layers, division
from evener.zoo.networks import resnet152, vgg16
from evener.zoo.sketch import Sketch
from imagined import convolutions

LAYERS = columns(convolutions(depth=3, width=16, rows=8, norm=True))
NAMES = [layer.name for layer in LAYERS.graph.layers]
IMAGE = 4 * 16 * 8 * 8


def names(flags: np.ndarray) -> set[str]:
    return {name for name, flag in zip(NAMES, flags, strict=True) if flag}


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_units_are_divided_as_apportion_does(size: int, shares: list[float]) -> None:
    by_hand = division(size, tuple(shares))
    assert sum(by_hand) == size
    workers = weights_to_workers(shares, [None] * len(shares))
    expected = apportion(size, workers)
    slowest = [max(n / share for n, share in zip(units, shares, strict=True)) for units in (by_hand, expected)]
    assert slowest[0] == pytest.approx(slowest[1])


@pytest.mark.parametrize("mode", MODES)
@given(shares=st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_the_parts_of_all_ranks_are_the_whole(mode: Mode, shares: list[float]) -> None:
    divided = divide_layers(LAYERS, mode, shares)
    for flags, field in (
        (divided.by_filter, "filters"),
        (divided.by_channel, "channels"),
        (divided.by_rows | divided.follows, "rows"),
    ):
        total = sum(getattr(part, field) for part in divided.parts)
        assert total[flags] == pytest.approx(1.0)
    assert sum(divided.shares) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["filter", "channel", "hybrid", "sharded"])
def test_divided_weights_are_held_once(mode: Mode) -> None:
    layers = columns(vgg16((3, 32, 32)))
    divided = divide_layers(layers, mode, [3.0, 2.0, 1.0])
    held = np.sum([divided.parameter_bytes(layers, rank) for rank in range(3)], axis=0)
    whole = ~(divided.by_filter | divided.by_channel) & layers.is_weighted
    expected = layers.weight_bytes + 2 * (layers.weight_bytes * whole + layers.bias_bytes * divided.by_channel)
    assert held[layers.is_weighted] == pytest.approx(expected[layers.is_weighted])


def test_filter_gathers_outputs_and_reduces_gradients_of_inputs() -> None:
    divided = divide_layers(LAYERS, "filter", [1, 1])
    assert names(divided.by_filter) == {"conv0", "conv1", "conv2", "head"}
    exchanges = divided.exchanges
    assert exchanges.forward_gather[NAMES.index("conv1")] == IMAGE
    assert exchanges.backward_reduce[NAMES.index("conv1")] == IMAGE
    assert exchanges.backward_reduce[NAMES.index("conv0")] == 0  # the samples have no gradient
    assert exchanges.forward_reduce.sum() == exchanges.backward_gather.sum() == exchanges.halo.sum() == 0


def test_channel_reduces_outputs_and_gathers_gradients_of_inputs() -> None:
    divided = divide_layers(LAYERS, "channel", [1, 1, 1, 1])
    assert names(divided.by_channel) == {"conv0", "conv1", "conv2", "head"}
    assert divided.exchanges.forward_reduce[NAMES.index("conv2")] == IMAGE
    assert divided.exchanges.backward_gather[NAMES.index("conv2")] == IMAGE
    assert divided.exchanges.forward_gather.sum() == 0


def test_hybrid_divides_filters_where_there_are_too_few_channels() -> None:
    divided = divide_layers(LAYERS, "hybrid", [1, 1, 1, 1])
    assert names(divided.by_filter) == {"conv0"}
    assert names(divided.by_channel) == {"conv1", "conv2", "head"}


def test_published_divisions_leave_linear_layers_and_few_channels_whole() -> None:
    assert names(divide_layers(LAYERS, "filter", [1, 1], published=True).by_filter) == {"conv0", "conv1", "conv2"}
    assert names(divide_layers(LAYERS, "channel", [1] * 4, published=True).by_channel) == {"conv1", "conv2"}


def test_sharded_moves_the_narrower_side_and_nothing_else() -> None:
    net = Sketch("bottleneck")
    x = net.relu(net.conv(net.input(64, 8, 8), "first", 64, 1, bias=False), "relu0")
    x = net.relu(net.norm(net.conv(x, "narrow", 16, 1, bias=False), "norm1"), "relu1")
    x = net.relu(net.norm(net.conv(x, "middle", 16, 3, 1, 1, bias=False), "norm2"), "relu2")
    net.relu(net.norm(net.conv(x, "wide", 64, 1, bias=False), "norm3"), "relu3")
    layers = columns(net.graph())
    order = [layer.name for layer in layers.graph.layers]
    divided = divide_layers(layers, "sharded", [1, 1])
    narrow = 4 * 16 * 8 * 8
    told = dict(
        zip(order, zip(divided.exchanges.forward_gather, divided.exchanges.backward_gather, strict=True), strict=True)
    )
    assert told["narrow"] == told["middle"] == told["wide"] == (narrow, narrow)
    assert all(told[name] == (0, 0) for name in order if name.startswith(("norm", "relu")))
    assert {name for name, flag in zip(order, divided.follows, strict=True) if flag} == set(order) - {
        "first", "narrow", "middle", "wide",
    }  # fmt: skip


def test_sharded_sends_at_most_two_fifths_of_what_filter_sends_for_resnet152() -> None:
    layers = columns(resnet152((3, 64, 64)))
    for size in (2, 4):
        own, published = (divide_layers(layers, mode, [1.0] * size).exchanges for mode in ("sharded", "filter"))
        ours = (own.forward_gather + own.backward_gather).sum()
        theirs = (published.forward_gather + 2 * published.backward_reduce).sum()
        assert ours <= 0.4 * theirs


def test_rows_end_where_a_layer_cannot_be_divided_by_them() -> None:
    layers = columns(vgg16((3, 64, 64)))
    order = [layer.name for layer in layers.graph.layers]
    divided = divide_layers(layers, "spatial", [1.0] * 5)
    in_strips = [name for name, flag in zip(order, divided.by_rows, strict=True) if flag]
    assert in_strips[-1] == "features.30"  # two rows for five ranks: three of them have none
    assert [part.rows[order.index("features.30")] for part in divided.parts].count(0) == 3
    assert divided.exchanges.forward_gather[order.index("avgpool")] == 4 * 512 * 2 * 2
    assert (divided.exchanges.forward_gather > 0).sum() == 1


def test_a_single_row_is_not_divided() -> None:
    layers = columns(vgg16((3, 32, 32)))
    divided = divide_layers(layers, "spatial", [1.0, 1.0])
    gathered = np.flatnonzero(divided.exchanges.forward_gather)
    assert [layers.graph.layers[index].name for index in gathered] == ["features.30"]


def test_the_gradient_of_a_value_that_two_layers_read_is_exchanged_once_but_not_as_published() -> None:
    net = Sketch("fork")
    x = net.relu(net.conv(net.input(8, 4, 4), "stem", 8, 1, bias=False), "relu")
    net.add(net.conv(x, "left", 8, 1, bias=False), net.conv(x, "right", 8, 1, bias=False))
    layers = columns(net.graph())
    size = 4 * 8 * 4 * 4
    own, published = (divide_layers(layers, "filter", [1, 1], published=flag).exchanges for flag in (False, True))
    assert own.backward_reduce.tolist() == [0, 0, size, 0]
    assert published.backward_reduce.tolist() == [0, 0, size, size]


def test_a_halo_is_a_row_on_either_side_of_a_3x3_window_and_none_of_a_1x1() -> None:
    halo = divide_layers(LAYERS, "spatial", [1, 1]).exchanges.halo
    assert halo[NAMES.index("conv1")] == 2 * 4 * 16 * 8
    assert halo[NAMES.index("conv0")] == 2 * 4 * 3 * 8
    assert halo[NAMES.index("norm1")] == 0


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_a_faster_rank_never_gets_less(shares: list[float]) -> None:
    units = division(97, tuple(shares))
    ordered = sorted(zip(shares, units, strict=True))
    assert all(a[1] <= b[1] or a[0] == b[0] for a, b in pairwise(ordered))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([2.0, 0.5, 8.0]))
def test_only_ratios_of_speeds_matter(shares: list[int], factor: float) -> None:
    assert division(64, tuple(map(float, shares))) == division(64, tuple(share * factor for share in shares))
