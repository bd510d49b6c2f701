"""Seconds of layers: by roofline, by measured sums, by layers' own timings."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.oracle.cost.layers import columns
from evener.oracle.cost.roofline import (
    BACKWARD,
    FORWARD,
    DeviceSpeed,
    LayerShare,
    complete_share,
    device_of,
    layer_seconds,
    roofline,
)
from evener.oracle.zoo.networks import resnet50
from evener.oracle.zoo.sketch import Sketch
from evener.records.errors import InvalidValue
from evener.records.profile import BatchTiming, LayerTiming, TaskTiming
from support.imagined_machines import convolutions, device

LAYERS = columns(convolutions())
TIMING = TaskTiming(
    task="task",
    precision="fp32",
    batches=(
        BatchTiming(samples=10, forward_seconds=0.2, backward_seconds=0.3),
        BatchTiming(samples=20, forward_seconds=0.3, backward_seconds=0.5),
    ),
    update_seconds=0.01,
)


def part(filters: float = 1.0, channels: float = 1.0, rows: float = 1.0) -> LayerShare:
    ones = np.ones((1, len(LAYERS)))
    return LayerShare(filters=filters * ones, channels=channels * ones, rows=rows * ones)


def test_a_convolution_is_bound_by_arithmetic_and_a_relu_by_memory() -> None:
    net = Sketch("two layers")
    net.relu(net.conv(net.input(64, 10, 10), "conv", 32, 3, 1, 1, bias=False), "relu")
    seconds = layer_seconds(columns(net.graph()), [DeviceSpeed(conv_flops=1e9, matmul_flops=1e9, bandwidth=1e9)])
    flops = 2 * 64 * 32 * 9 * 100
    assert seconds.each[FORWARD, 0] == pytest.approx([flops / 1e9, 2 * 4 * 3200 / 1e9])
    assert seconds.each[BACKWARD, 0] == pytest.approx([flops / 1e9, 3 * 4 * 3200 / 1e9])  # images need no gradient
    assert seconds.fixed[FORWARD, 0] == pytest.approx([4 * 64 * 32 * 9 / 1e9, 0])


def test_the_gradient_of_the_input_costs_as_much_again() -> None:
    seconds = layer_seconds(LAYERS, [DeviceSpeed(conv_flops=1e9, matmul_flops=1e9, bandwidth=1e15)])
    second = LAYERS.graph.by_name["conv1"].forward_flops / 1e9
    assert seconds.each[FORWARD, 0, 2] == pytest.approx(second)
    assert seconds.each[BACKWARD, 0, 2] == pytest.approx(2 * second)


def test_residual_sum_reads_and_writes_and_adds_its_gradients() -> None:
    layers = columns(resnet50())
    index = [layer.name for layer in layers.graph.layers].index("layer1.1.relu#3")
    size = 256 * 56 * 56 * 4
    assert layers.forward_in[index] + layers.forward_out[index] == (2 + 3) * size
    assert layers.backward_in[index] + layers.backward_out[index] == (3 + 3) * size


def test_every_pass_of_a_layer_has_a_launch_cost() -> None:
    quick, slow = (DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e12, pass_seconds=s) for s in (0.0, 1.0))
    assert layer_seconds(LAYERS, [slow]).sum(0) == pytest.approx(
        layer_seconds(LAYERS, [quick]).sum(0) + 2 * len(LAYERS)
    )


def test_measured_task_seconds_are_divided_among_layers() -> None:
    plain = DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e11, pass_seconds=1e-4)
    timed = replace(plain, timing=TIMING)
    seconds, guess = layer_seconds(LAYERS, [timed]), layer_seconds(LAYERS, [plain])
    assert seconds.of(10)[FORWARD].sum() == pytest.approx(0.2)
    assert seconds.of(20)[BACKWARD].sum() == pytest.approx(0.5)
    assert seconds.each[FORWARD] / seconds.each[FORWARD].sum() == pytest.approx(
        guess.each[FORWARD] / guess.each[FORWARD].sum()
    )


def test_layer_timed_alone_has_its_measured_seconds() -> None:
    layer_timing = LayerTiming(layer="relu0", forward_fixed=1, forward_sample=2, backward_fixed=3, backward_sample=4)
    timing = msgspec.structs.replace(TIMING, layers=(layer_timing,))
    seconds = layer_seconds(LAYERS, [DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e11, timing=timing)])
    assert seconds.of(10)[:, 0, 1].tolist() == [21, 43]


def test_calibration_scales_all_layers() -> None:
    one, two = (
        layer_seconds(
            LAYERS, [DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e11, timing=TIMING, learnt=learnt)]
        )
        for learnt in (1.0, 2.0)
    )
    assert two.fixed.sum() == pytest.approx(2 * one.fixed.sum())
    assert two.each.sum() == pytest.approx(2 * one.each.sum())


def test_a_part_of_a_timed_layer_costs_its_part_of_the_measured_seconds() -> None:
    timed = DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e15, timing=TIMING)
    full, half = layer_seconds(LAYERS, [timed]), layer_seconds(LAYERS, [timed], part(filters=0.5))
    is_weighted = LAYERS.is_weighted
    assert half.each[FORWARD, 0, is_weighted] == pytest.approx(full.each[FORWARD, 0, is_weighted] / 2)
    assert (half.fixed == full.fixed).all()


def test_narrow_convolutions_are_as_slow_as_measured() -> None:
    device = DeviceSpeed(conv_flops=1e12, matmul_flops=1e12, bandwidth=1e15, widths=((1, 1 / 32), (32, 1.0)))
    assert device.efficiency(np.array([1.0, 8.0, 32.0, 500.0])) == pytest.approx([1 / 32, 1 / 4, 1, 1])
    whole_time = roofline(LAYERS, [device], part()).each[FORWARD, 0, 0]
    assert roofline(LAYERS, [device], part(filters=0.25)).each[FORWARD, 0, 0] == pytest.approx(
        whole_time
    )  # 16 of 32, 4 of 32


@given(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.05, 1))
def test_a_part_never_costs_more_than_the_complete_layer(filters: float, channels: float, rows: float) -> None:
    device = DeviceSpeed(
        conv_flops=1e12, matmul_flops=1e12, bandwidth=1e10, pass_seconds=1e-6, widths=((1, 0.03), (64, 1.0))
    )
    small, full = (
        roofline(LAYERS, [device], part(filters, channels, rows)),
        roofline(LAYERS, [device], complete_share(LAYERS)),
    )
    assert (small.of(7) <= full.of(7) * (1 + 1e-9)).all()


def test_half_precision_halves_the_activations_but_not_the_parameters() -> None:
    half = columns(convolutions(), element_bytes=2)
    assert half.output_bytes == pytest.approx(LAYERS.output_bytes / 2)
    assert half.kept_bytes == pytest.approx(LAYERS.kept_bytes / 2)
    assert half.weight_bytes == pytest.approx(LAYERS.weight_bytes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"throughputs": ()}, "throughputs of ada cuda:0"),
        ({"bandwidth": None}, "bandwidth of ada cuda:0"),
    ],
)
def test_a_device_without_measurements_is_refused(changes: dict[str, object], field: str) -> None:
    profile = msgspec.structs.replace(device(), **changes)
    with pytest.raises(InvalidValue) as caught:
        device_of(profile, "task", "fp32")
    assert caught.value.field == field
    timed = msgspec.structs.replace(profile, timings=(TIMING,))
    assert device_of(timed, "task", "fp32").timing == TIMING
