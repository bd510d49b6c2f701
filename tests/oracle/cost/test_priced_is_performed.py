"""The bytes that are priced are those of the division that is performed, one by one: no tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evener.oracle.cost.layers import columns
from evener.oracle.cost.partition import MODES, DividedLayers, operations_of
from evener.oracle.division.layout import Replica
from evener.oracle.division.network import Network
from evener.oracle.division.plan import Arrangement, plan_replicas
from evener.oracle.division.rules import DivisionName
from evener.oracle.zoo.networks import draw
from evener.oracle.zoo.sketch import Sketch
from evener.parallel.op_graph import op_graph
from evener.records.graph import ModelGraph
from evener.tracer.model_graph import trace_model_graph
from support.division_networks import residual_net
from support.imagined_machines import convolutions
from support.step_traffic import step_traffic

ELSEWHERE = ("statistics", "gradients")
"""Kinds of exchanges that are not those of the layers' values."""
shares = st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.5, 0.3]), min_size=2, max_size=6).filter(any)


def priced(graph: ModelGraph, mode: DivisionName, ranks: tuple[float, ...]) -> list[int]:
    """Bytes of one sample that every rank sends, times the number of ranks: whole numbers, as rings send p-ths."""
    size = len(ranks) if mode == "hybrid" else 2
    split = DividedLayers(columns(graph), mode, size, published=False).among(Replica(shares=ranks))
    return [round(len(ranks) * nbytes) for nbytes in split.sent_bytes.tolist()]


def performed(network: Network, mode: DivisionName, ranks: tuple[float, ...], samples: int = 1) -> list[int]:
    """Return the bytes of one sample that every rank sends by the plan that the ranks perform."""
    arrangement = Arrangement(division=mode, replicas=(Replica(shares=ranks),))
    traffic = step_traffic(plan_replicas(network, arrangement), arrangement, 4)
    sent = [sum(both[0] for kind, both in kinds.items() if kind not in ELSEWHERE) for kinds in traffic]
    return [round(len(ranks) * nbytes / samples) for nbytes in sent]


def mixed(depth: int, width: int, rows: int, seed: int) -> ModelGraph:
    """Convolutions of many widths and strides with shortcuts, concatenations, poolings and enlargements."""
    net, odd = Sketch("mixed"), seed % 7 + 1
    x = net.input(3, rows, rows + odd)
    for i in range(depth):
        kernel, stride = (1, 3, 5)[(seed + i) % 3], 1 + (seed >> i) % 2
        y = net.relu(
            net.norm(net.conv(x, f"conv{i}", width + i * odd, kernel, stride, kernel // 2), f"norm{i}"), f"r{i}"
        )
        kind = (seed >> (2 * i)) % 5
        if kind == 0:
            y = net.add(y, net.conv(x, f"short{i}", width + i * odd, 1, stride))
        elif kind == 1:
            y = net.concat(y, net.conv(y, f"grow{i}", odd, 3, 1, 1))
        elif kind == 2 and min(y.shape[1:]) > 3:
            y = net.pool(y, f"pool{i}", 3, 2, 1)
        elif kind == 3:
            y = net.conv(y, f"up{i}", width, 2, 2, transposed=True)
        x = y
    net.linear(net.flatten(net.average(x, "average")), "head", 5)
    return net.graph()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(4, 17), st.integers(0, 2**12), shares)
def test_prices_of_random_networks_match_the_plan_for_any_shares(
    mode: DivisionName, depth: int, width: int, rows: int, seed: int, ranks: list[float]
) -> None:
    graph = mixed(depth, width, rows, seed)
    expected = performed(operations_of(graph).network, mode, tuple(ranks))
    assert priced(graph, mode, tuple(ranks)) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vgg16", "unet", "cosmoflow"])
def test_prices_of_the_zoo_match_the_plan(name: str, mode: DivisionName) -> None:
    graph, ranks = draw(name), (3.0, 0.0, 1.0, 2.0, 1.7)
    assert priced(graph, mode, ranks) == performed(operations_of(graph).network, mode, ranks)


def plain() -> nn.Module:
    """Narrowing, widening and equal convolutions, normalisation, pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 16, 3, 2, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 12, 3, padding=1, groups=4),
        nn.Upsample(scale_factor=2.0),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 16, 2, 2),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 8),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [(1.0, 1.0), (1.0,) * 4, (3.0, 1.0, 2.0), (1.0, 0.0, 2.5, 0.4)])
@pytest.mark.parametrize("build", [plain, residual_net])
def test_traced_model_is_priced_like_its_divided_modules(
    build: Callable[[], nn.Module], ranks: tuple[float, ...], mode: DivisionName
) -> None:
    model, images = build(), torch.zeros(6, 3, 16, 16)
    expected = performed(op_graph(model, [images]).network, mode, ranks, samples=len(images))
    assert priced(trace_model_graph(model, images), mode, ranks) == expected


def volumes() -> nn.Module:
    """Strides, groups, poolings, enlargement and a linear layer, in three dimensions."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1, bias=False),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(3, 2, 1),
        nn.Conv3d(8, 12, (5, 3, 1), (2, 1, 1), (2, 1, 0), groups=4),
        nn.ReLU(),
        nn.ConvTranspose3d(12, 6, 2, 2),
        nn.AdaptiveMaxPool3d((3, 2, 4)),
        nn.Flatten(),
        nn.Linear(6 * 24, 5),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [(1.0, 1.0), (1.0, 0.0, 2.5, 0.4)])
def test_traced_volume_model_is_priced_like_its_division(ranks: tuple[float, ...], mode: DivisionName) -> None:
    model, inputs = volumes(), torch.zeros(4, 2, 11, 8, 6)
    expected = performed(op_graph(model, [inputs]).network, mode, ranks, samples=len(inputs))
    assert priced(trace_model_graph(model, inputs), mode, ranks) == expected


def test_a_narrow_network_on_many_ranks_sends_the_predicted_bytes() -> None:
    graph = convolutions(depth=3, width=5, rows=3, norm=True)
    for mode in MODES:
        ranks = tuple(1.0 + 0.3 * i for i in range(9))
        assert priced(graph, mode, ranks) == performed(operations_of(graph).network, mode, ranks)
