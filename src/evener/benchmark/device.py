"""One device's profile: its name, memory, bandwidth and throughputs; and the versions of what measured it."""

from __future__ import annotations

import torch

from evener import host
from evener.benchmark.compute import measure_throughputs
from evener.benchmark.memory import measure_bandwidth
from evener.benchmark.widths import measure_pass, measure_widths
from evener.errors import require
from evener.memory import usable_memory
from evener.profile import PRECISIONS, DeviceProfile, Throughput

_BANDWIDTH_SHARE = 0.05
_WIDTHS_SHARE = 0.05
_PASS_SHARE = 0.02
_THROUGHPUT_SHARE = 1 - 2 * _BANDWIDTH_SHARE - _WIDTHS_SHARE - _PASS_SHARE


def profile_device(
    node: str,
    device: torch.device,
    *,
    speed: float = 1.0,
    memory_limit: int | None = None,
    seconds: float = 8.0,
) -> DeviceProfile:
    """Measure one device of `node`.

    Everything is measured again and again over the whole time and the best counts, so that a short disturbance spoils
    nothing. The FLOP/s and bytes/s of a node slowed down on purpose are those of the device times `speed`: what its
    `Pace` leaves of them.

    Args:
        node: name of the machine.
        device: to measure.
        speed: 1.0, or the fraction to which the node is slowed down.
        memory_limit: bytes that the user grants on this node; None for all that are usable.
        seconds: for the whole measure, about; compiling at a first call comes on top.

    Raises:
        InvalidValue: `speed` is not above 0 and at most 1; `memory_limit` or `seconds` is not positive.
    """
    require(0 < speed <= 1, "speed", speed, "above 0 and at most 1")
    require(seconds > 0, "seconds", seconds, "positive")
    total, usable = usable_memory(str(device), memory_limit)
    bandwidth = measure_bandwidth(device, seconds * _BANDWIDTH_SHARE)
    throughputs = measure_throughputs(device, PRECISIONS, seconds * _THROUGHPUT_SHARE)
    bandwidth = max(bandwidth, measure_bandwidth(device, seconds * _BANDWIDTH_SHARE))
    model, cores = _model_and_cores(device)
    return DeviceProfile(
        node=node,
        device=str(device),
        model=model,
        cores=cores,
        memory_bytes=total,
        usable_memory_bytes=usable,
        bandwidth=bandwidth * speed,
        throughputs=tuple(_slowed(throughput, speed) for throughput in throughputs),
        speed=speed,
        pass_seconds=measure_pass(device, seconds * _PASS_SHARE) / speed,
        widths=measure_widths(device, seconds * _WIDTHS_SHARE),
    )


def environment() -> dict[str, str]:
    """Versions and facts that a reader of a profile or record needs to compare it with another."""
    facts = {**host.environment(), "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return facts


def _slowed(throughput: Throughput, speed: float) -> Throughput:
    return Throughput(
        precision=throughput.precision,
        matmul_flops=throughput.matmul_flops and throughput.matmul_flops * speed,
        conv_flops=throughput.conv_flops and throughput.conv_flops * speed,
        reason=throughput.reason,
    )


def _model_and_cores(device: torch.device) -> tuple[str, int]:
    """The maker's name; multiprocessors of a GPU, or the threads with which PyTorch computes on the CPU."""
    if device.type != "cuda":
        return host.cpu_model(), torch.get_num_threads()
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
