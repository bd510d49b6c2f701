"""Measures the profile of one device: memory, bandwidth, throughput, and the efficiency of narrow operations."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from evener.benchmark.throughput import measure_throughputs
from evener.benchmark.timing import DeviceClock, num_workers, rounds, run_threaded
from evener.records.errors import require
from evener.records.profile import PRECISIONS, DeviceProfile, Throughput, WidthEfficiency
from evener.system import accelerators, host
from evener.system.memory import usable_memory

_BANDWIDTH_SHARE = 0.05
_WIDTHS_SHARE = 0.05
_PASS_SHARE = 0.02
_THROUGHPUT_SHARE = 1 - 2 * _BANDWIDTH_SHARE - _WIDTHS_SHARE - _PASS_SHARE
_CPU_COPY_BYTES = 128 << 20
_CPU_PIECE_BYTES = 4 << 20
_GPU_COPY_BYTES = 1 << 30
_MEMORY_DIVISOR = 8
_FILTERS = (4, 8, 16, 32, 64, 128, 256)
_CHANNELS, _SIDE = 64, 32
"""Channels and side of the convolved images."""
_LAYERS = 32
_MIN_ROUNDS = 3


def profile_device(
    node: str,
    device: torch.device,
    *,
    speed: float = 1.0,
    memory_limit: int | None = None,
    seconds: float = 8.0,
) -> DeviceProfile:
    """Measure one device of `node`.

    Every quantity is measured repeatedly over the full time and the best value counts, so that a short disturbance has
    no effect. FLOP/s and bytes/s of a deliberately slowed node are those of the device times `speed`.

    Args:
        node: name of the machine.
        device: device to measure.
        speed: 1.0, or the fraction to which the node is slowed down.
        memory_limit: bytes that the user grants on this node; None for all usable memory.
        seconds: approximate duration of all measurements; compiling in first calls takes additional time.

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
    """Return the versions and facts that are needed to compare a profile or record with another one."""
    return {**host.environment(), **accelerators.versions()}


def _slowed(throughput: Throughput, speed: float) -> Throughput:
    matmul, conv = throughput.matmul_flops, throughput.conv_flops
    return replace(throughput, matmul_flops=matmul and matmul * speed, conv_flops=conv and conv * speed)


def _model_and_cores(device: torch.device) -> tuple[str, int]:
    """Return the model name, and the multiprocessors of an accelerator or the number of PyTorch's CPU threads."""
    if accelerators.is_accelerator(device):
        return accelerators.model_and_units(device)
    return host.cpu_model(), torch.get_num_threads()


def measure_bandwidth(device: torch.device, budget_seconds: float) -> float:
    """Return the bytes per second that `device` reads and writes, together, in copies larger than its caches.

    On a CPU each of PyTorch's threads copies memory of its own, all at the same time, and their rates are added (see
    `timing`). Pieces of 4 MB are timed individually while cycling through memory, so that no piece is still in a cache.
    The fastest tenth counts, because other processes may use the same memory.

    The measurement ends after `budget_seconds`; every piece is copied at least twice.
    """
    room = usable_memory(str(device))[1] // _MEMORY_DIVISOR // num_workers(device)
    return sum(run_threaded(device, lambda: _copy_rate(device, room, budget_seconds)))


def _copy_rate(device: torch.device, room_bytes: int, budget_seconds: float) -> float:
    """Return the bytes per second that the calling thread reads and writes, copying within `room_bytes`."""
    pieces = _pieces(device, room_bytes)
    clock, times = DeviceClock(device), list[float]()
    for _ in rounds(budget_seconds, min_rounds=2):
        times += [clock.time(partial(to.copy_, of)) for to, of in pieces]
    return 2 * pieces[0][0].nbytes / sorted(times)[len(times) // 10]


def _pieces(device: torch.device, room_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs to copy (to, from) of equal size, together as large as useful within `room_bytes`."""
    is_accelerator = accelerators.is_accelerator(device)
    total = min(_GPU_COPY_BYTES if is_accelerator else _CPU_COPY_BYTES, room_bytes)
    piece = total // 2 if is_accelerator else min(_CPU_PIECE_BYTES, total // 2)
    count, elements = max(1, total // 2 // max(1, piece)), max(1, piece // 4)
    target, source = (torch.full((count, elements), value, device=device) for value in (0.0, 1.0))
    return list(zip(target.unbind(), source.unbind(), strict=True))


def measure_widths(device: torch.device, budget_seconds: float) -> tuple[WidthEfficiency, ...]:
    """Return the relative FLOP/s of 3x3 convolutions by number of filters; each is timed at least three times."""
    clock, images = DeviceClock(device), torch.rand(4, _CHANNELS, _SIDE, _SIDE, device=device)
    weights = [torch.rand(filters, _CHANNELS, 3, 3, device=device) for filters in _FILTERS]
    seconds: list[list[float]] = [[] for _ in weights]
    with torch.no_grad():
        for _ in rounds(budget_seconds, min_rounds=_MIN_ROUNDS + 1):
            for times, weight in zip(seconds, weights, strict=True):
                times.append(clock.time(partial(F.conv2d, images, weight, padding=1)))
    rates = [filters / median(times[1:]) for filters, times in zip(_FILTERS, seconds, strict=True)]
    return tuple(
        WidthEfficiency(filters=filters, efficiency=min(1.0, rate / max(rates)))
        for filters, rate in zip(_FILTERS, rates, strict=True)
    )


def measure_pass(device: torch.device, budget_seconds: float) -> float:
    """Return the seconds of one pass of one layer with almost nothing to compute: the mean of forward and backward."""
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(_LAYERS))).to(device)
    clock, numbers, times = DeviceClock(device), torch.ones(1, 1, device=device), list[float]()

    def passes() -> None:
        outputs: Tensor = layers(numbers)
        torch.autograd.backward(outputs * outputs)  # cuBLAS warns if backward begins with it on a fresh thread

    for _ in rounds(budget_seconds, min_rounds=_MIN_ROUNDS + 1):
        times.append(clock.time(passes))
    return median(times[1:]) / (2 * _LAYERS)
