"""The profile of one device: bandwidth, narrow operations, and the complete profile."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import pytest
import torch

from evener.benchmark import device as device_module
from evener.benchmark.device import environment, measure_bandwidth, measure_pass, measure_widths, profile_device
from evener.records.errors import InvalidValue
from evener.records.profile import PRECISIONS, ClusterProfile, Precision, Throughput
from support.accelerator import DEVICE, needs_device

CPU = torch.device("cpu")


@pytest.mark.alone
def test_profile_has_every_precision_within_its_time_and_survives_json() -> None:
    start = time.perf_counter()
    profile = profile_device("alpha", CPU, memory_limit=1 << 29, seconds=1.0)
    assert time.perf_counter() - start < 10
    assert tuple(t.precision for t in profile.throughputs) == PRECISIONS
    assert profile.usable_memory_bytes == 1 << 29
    assert (profile.node, profile.device, profile.cores) == ("alpha", "cpu", torch.get_num_threads())
    assert profile.model
    cluster = ClusterProfile(devices=(profile,), environment=environment())
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=ClusterProfile) == cluster


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second measure of bandwidth is disturbed; fp16 has no convolution."""
    bandwidths = iter((8e9, 2e9))

    def throughputs(device: torch.device, precisions: Sequence[Precision], budget: float) -> tuple[Throughput, ...]:
        whole = [Throughput(precision=precision, matmul_flops=4e9, conv_flops=2e9) for precision in precisions]
        half = Throughput(precision="fp16", matmul_flops=4e9, reason="convolution: no")
        return tuple(half if one.precision == "fp16" else one for one in whole)

    monkeypatch.setattr(device_module, "measure_bandwidth", lambda device, budget: next(bandwidths))
    monkeypatch.setattr(device_module, "measure_throughputs", throughputs)


@pytest.mark.usefixtures("known_rates")
@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_slowed_node_profile_is_scaled_by_its_speed(speed: float) -> None:
    profile = profile_device("alpha", CPU, speed=speed)
    assert profile.speed == speed
    assert profile.bandwidth == 8e9 * speed
    assert [t.matmul_flops for t in profile.throughputs] == [4e9 * speed] * 4
    assert [t.conv_flops for t in profile.throughputs] == [2e9 * speed, 2e9 * speed, None, 2e9 * speed]
    assert profile.throughputs[2].reason == "convolution: no"


@pytest.mark.parametrize(("speed", "seconds"), [(0.0, 1.0), (1.5, 1.0), (1.0, 0.0)])
def test_invalid_argument_is_refused_before_measuring(speed: float, seconds: float) -> None:
    with pytest.raises(InvalidValue):
        profile_device("alpha", CPU, speed=speed, seconds=seconds)


def test_environment_names_all_versions() -> None:
    facts = environment()
    assert facts.keys() >= {"evener", "python", "torch", "os", "cpu", "cuda"}
    assert all(facts.values())
    assert facts["torch"] == torch.__version__


@pytest.mark.slow
@needs_device
def test_gpu_profile_stays_within_its_memory() -> None:
    profile = profile_device("alpha", torch.device(DEVICE), seconds=4.0)
    assert profile.usable_memory_bytes <= profile.memory_bytes
    fp32, slowest = profile.throughputs[1], 1e8 if DEVICE.startswith("standin") else 1e10
    assert fp32.matmul_flops is not None
    assert fp32.matmul_flops > 10 * slowest
    assert profile.bandwidth is not None
    assert profile.bandwidth > slowest


@pytest.mark.alone
def test_bandwidth_measurements_agree_and_are_plausible() -> None:
    rates = [measure_bandwidth(CPU, 0.15) for _ in range(3)]
    assert max(rates) < 2 * sorted(rates)[1]
    assert min(rates) > 1e8
    assert max(rates) < 1e13


def test_bandwidth_counts_bytes_read_and_written_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.benchmark.device.DeviceClock.time", lambda self, work: 0.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert measure_bandwidth(CPU, 1e-9) == 3 * 2 * (4 << 20) / 0.5


def test_copy_cycle_exceeds_caches_where_memory_allows() -> None:
    pieces = device_module._pieces(CPU, 1 << 40)
    assert sum(to.nbytes + of.nbytes for to, of in pieces) == 128 << 20
    assert len({part.data_ptr() for pair in pieces for part in pair}) == 2 * len(pieces)


@pytest.mark.parametrize("room", [1, 1000, 1 << 20, 9 << 20])
def test_copies_stay_within_their_memory_limit(room: int) -> None:
    pieces = device_module._pieces(CPU, room)
    assert 0 < sum(to.nbytes + of.nbytes for to, of in pieces) <= max(8, room)


@pytest.mark.alone
def test_efficiencies_are_fractions_of_the_best_width() -> None:
    found = measure_widths(CPU, 0.05)
    assert [one.filters for one in found] == [4, 8, 16, 32, 64, 128, 256]
    assert max(one.efficiency for one in found) == 1.0
    assert found[0].efficiency < 0.9  # four filters do not fill a vector of 8 or 16 numbers


@pytest.mark.alone
def test_tiny_layer_pass_takes_microseconds() -> None:
    assert 1e-7 < measure_pass(CPU, 0.02) < 5e-3
