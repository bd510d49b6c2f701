"""Filter, channel and spatial parallelism, and their hybrids with data parallelism, give what one process gives.

Outputs, gradients of inputs and weights, weights after three steps, running statistics: 1e-10 in float64, for shares
that nothing divides, ranks without any share and strips of a row. And the bytes counted are the bytes predicted.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import torchvision_operators  # noqa: F401
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import DivisionName
from support.compare_divided import Serial, close, gradient_of_inputs, hold_against, serial, train
from support.division_networks import CASES, YoloV8
from support.thread_ranks import together

import torchvision  # isort: skip

PUBLISHED: list[DivisionName] = ["filter", "channel", "hybrid"]
OURS: list[DivisionName] = ["sharded", "spatial"]
WAYS: dict[str, tuple[Replica, ...]] = {
    "alone": (Replica(shares=(1,)),),
    "two": (Replica(shares=(2, 3)),),
    "uneven": (Replica(shares=(5, 2, 1)),),
    "idle": (Replica(shares=(1, 0, 2)),),
    "five": (Replica(shares=(1, 1, 1, 1, 1)),),
    "data+two": (Replica(shares=(2, 1)), Replica(shares=(1,))),
    "data+three+two": (Replica(shares=(1, 1, 1)), Replica(shares=(3, 1))),
}
GRID = (Replica(shares=(2, 1), columns=(1, 2)),)


def hold(expected: Serial, division: DivisionName, replicas: tuple[Replica, ...], recompute: bool = False) -> None:
    arrangement = Arrangement(division=division, replicas=replicas)
    total = len(expected.inputs[0])
    samples = [total - len(replicas) + 1, *[1] * (len(replicas) - 1)]
    parts = together(arrangement.size, lambda group: hold_against(group, expected, arrangement, samples, recompute))
    close(gradient_of_inputs(parts, arrangement), expected.input_grads, "gradient of the inputs")


QUICK = [name for name in CASES if name != "yolo"]
"""Slow: `test_every_division_in_every_arrangement_equals_serial`."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "uneven") for name in QUICK),
        *((name, way) for name in ("residual", "mixed") for way in ("idle", "data+three+two")),
    ],
)
@pytest.mark.parametrize("division", OURS)
def test_our_divisions_equal_serial(name: str, division: DivisionName, way: str) -> None:
    hold(serial(name), division, WAYS[way])


@pytest.mark.parametrize("way", ["uneven", "data+two"])
@pytest.mark.parametrize("division", PUBLISHED)
@pytest.mark.parametrize("name", ["residual", "odd"])
def test_published_divisions_equal_serial(name: str, division: DivisionName, way: str) -> None:
    hold(serial(name), division, WAYS[way])


@pytest.mark.parametrize(
    "name", [name if name != "yolo" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_rows_and_columns_equal_serial(name: str) -> None:
    hold(serial(name), "spatial", GRID)


@pytest.mark.parametrize("division", ["filter", *OURS])
@pytest.mark.parametrize("name", ["residual", "mixed"])
def test_activation_checkpointing_equals_serial(name: str, division: DivisionName) -> None:
    hold(serial(name), division, WAYS["idle"], recompute=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("division", [*PUBLISHED, *OURS])
@pytest.mark.parametrize("name", CASES)
def test_every_division_in_every_arrangement_equals_serial(name: str, division: DivisionName, way: str) -> None:
    hold(serial(name), division, WAYS[way])


def resnet152() -> nn.Module:
    """With residual branches of a quarter: at random, rounding grows to 1e-9 in two steps of one process already."""
    model: nn.Module = torchvision.models.resnet152(num_classes=20)
    for module in model.modules():
        if isinstance(module, torchvision.models.resnet.Bottleneck):
            nn.init.constant_(module.bn3.weight, 0.25)
    return model


def vgg16() -> nn.Module:
    """Without dropout (see test_drawn_ops.py), and with a narrow classifier, to fit the memory several times."""
    model: nn.Module = torchvision.models.vgg16(num_classes=10)
    model.classifier = nn.Sequential(nn.Linear(25088, 61), nn.ReLU(True), nn.Linear(61, 10))
    return model


REAL = {
    "resnet152": (resnet152, (4, 3, 64, 64)),
    "vgg16": (vgg16, (2, 3, 64, 64)),
    "yolov8n": (YoloV8, (2, 3, 128, 96)),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("division", [*PUBLISHED, *OURS])
@pytest.mark.parametrize("name", REAL)
def test_real_networks_equal_serial(name: str, division: DivisionName) -> None:
    build, shape = REAL[name]
    torch.manual_seed(0)
    expected = train(build().double(), shape, 1e-3)
    for way in ("uneven", "data+two"):
        hold(expected, division, WAYS[way])


@pytest.mark.parametrize(
    ("division", "way"), [("spatial", "two"), ("sharded", "data+two")], ids=["over all ranks", "along the data axis"]
)
def test_comparison_detects_gradients_that_are_not_summed(division: DivisionName, way: str) -> None:
    """The checker itself."""
    with mock.patch("evener.parallel.sharded.GradientSums"), pytest.raises(AssertionError, match=r"bytes|gradient of"):
        hold(serial("residual"), division, WAYS[way])
