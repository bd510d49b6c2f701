"""Measures the profile of one device: memory, bandwidth, throughput, and the efficiency of narrow operations.

Throughput is FLOP/s at each precision, of square matrix products and 3x3 convolutions of increasing size:

    rung 0, 1, 2 ...         increasing problems of one kind, each timed on the way up
    climb while              a call is short (below 2 ms), or longer but its rate well above that of the rung below
    the top                  the lowest rung from which climbing further does not pay, as far as known
    until the time is over   for each ladder in turn: time the top and the two rungs below it again, find the new top,
                             and climb further if that pays now
    the answer               the highest rate among these three rungs and those above

The seconds of a rung are the lower quartile of its calls. On a busy machine many calls are slower, so the mean would
not be repeatable. A few calls are faster than sustainable, while a process that shares the core happens to pause, so
the minimum would not be repeatable either. The quartile decides where to stop, not a single call.

Shape letters: N samples, C channels (in and out), H rows and columns.
"""

from __future__ import annotations

import time
import warnings
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from evener.benchmark.timing import DeviceClock, num_workers, rounds, run_threaded
from evener.records.errors import require
from evener.records.profile import PRECISIONS, DeviceProfile, Precision, Throughput, WidthEfficiency
from evener.system import accelerators, host
from evener.system.memory import usable_memory

_MIN_GAINS_BY_SECONDS = ((0.002, 0.0), (0.030, 1.1))
"""(seconds, gain): a call shorter than `seconds` is followed by a larger one if its rate grew by `gain`."""
_LONG_CALL = 0.005
_RUNGS_REPEATED = 3
_MIN_TURNS = 4

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

Work = Callable[[], object]
Random = Callable[..., Tensor]


class Autorange:
    """Problems of one kind and increasing size.

    Args:
        flops: FLOPs of one call at every rung, increasing.
        seconds_of: runs the problem of a rung once and returns its seconds. If it raises RuntimeError or TypeError, the
            ladder ends below that rung (out of memory); at rung 0 the device does not support this kind of work.
    """

    def __init__(self, flops: Sequence[float], seconds_of: Callable[[int], float]) -> None:
        self.refusal = ""
        self._flops, self._seconds_of = flops, seconds_of
        self._height = len(flops)
        self._times: list[list[float]] = []

    @property
    def rate(self) -> float | None:
        """The FLOP/s measured so far; None where the device does not support the work, as `refusal` says."""
        return max(self._rates()[self._lowest() :], default=None)

    def climb(self) -> None:
        """Time the next rungs, as long as climbing pays."""
        while len(self._times) < self._height and self._top() == len(self._times):
            try:
                self._times.append(self._first_times(len(self._times)))
            except (RuntimeError, TypeError) as error:
                self._height = len(self._times)
                self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__

    def repeat(self) -> None:
        """Time the top rungs again, and climb further if that pays now."""
        for rung in range(len(self._times))[self._lowest() : self._top() + 1]:
            insort(self._times[rung], self._seconds_of(rung))
        self.climb()

    def _first_times(self, rung: int) -> list[float]:
        """Return the time of the first call, or, if that was long, of the second: the first may include compiling."""
        seconds = self._seconds_of(rung)
        return [seconds if seconds < _LONG_CALL else min(seconds, self._seconds_of(rung))]

    def _quartiles(self) -> list[float]:
        return [times[len(times) // 4] for times in self._times]

    def _rates(self) -> list[float]:
        return [flops / seconds for flops, seconds in zip(self._flops, self._quartiles(), strict=False)]

    def _lowest(self) -> int:
        """Return the lowest rung that is repeated."""
        return max(0, min(self._top(), len(self._times) - 1) - _RUNGS_REPEATED + 1)

    def _top(self) -> int:
        """Return the lowest rung from which climbing does not pay, or else the first that was not timed."""
        below = 0.0
        for rung, (seconds, rate) in enumerate(zip(self._quartiles(), self._rates(), strict=True)):
            if not any(seconds < limit and rate > enough * below for limit, enough in _MIN_GAINS_BY_SECONDS):
                return rung
            below = rate
        return len(self._times)


def autorange(
    ladders: Sequence[Autorange], budget_seconds: float, now: Callable[[], float] = time.perf_counter
) -> None:
    """Climb every ladder, then repeat them in turn until the time (by the clock `now`) is over, at least four times."""
    start = now()
    for ladder in ladders:
        ladder.climb()
    for count, ladder in enumerate(cycle(ladders)):
        if count >= _MIN_TURNS * len(ladders) and now() - start >= budget_seconds:
            return
        ladder.repeat()


class Problem(NamedTuple):
    """A call to time.

    Attributes:
        flops: FLOPs of the call; a multiply-add counts two.
        prepare: (maker of random operands of a shape) -> the call.
    """

    flops: float
    prepare: Callable[[Random], Work]


def matrix_product(n: int) -> Problem:
    """Return the product of two n x n matrices."""

    def prepare(random: Random) -> Work:
        a, b, out = random(n, n), random(n, n), random(n, n)
        return lambda: torch.mm(a, b, out=out)

    return Problem(2.0 * n**3, prepare)


def convolution(samples: int, channels: int, height: int) -> Problem:
    """Return a 3x3 convolution of images (N, C, H, H) to as many channels, padded to keep H."""

    def prepare(random: Random) -> Work:
        images, weight = random(samples, channels, height, height), random(channels, channels, 3, 3)
        return lambda: F.conv2d(images, weight, padding=1)

    return Problem(2.0 * 9 * samples * channels**2 * height**2, prepare)


MATRIX_PRODUCTS = tuple(
    matrix_product(n)
    for n in (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
)
CONVOLUTIONS = tuple(
    convolution(*shape)
    for shape in (
        *((1, 16, 16), (1, 32, 16), (1, 32, 32), (1, 64, 32), (2, 64, 32), (4, 64, 32), (4, 128, 32), (8, 128, 32)),
        *((16, 128, 32), (16, 256, 32), (32, 256, 32), (64, 256, 32), (128, 256, 32), (256, 256, 32)),
        *((512, 256, 32), (1024, 256, 32), (2048, 256, 32), (4096, 256, 32)),
    )
)
_KINDS = {"matrix product": MATRIX_PRODUCTS, "convolution": CONVOLUTIONS}


def measure_throughputs(
    device: torch.device, precisions: Sequence[Precision], budget_seconds: float
) -> tuple[Throughput, ...]:
    """Return the FLOP/s of `device` at some precisions, the best over sizes that fill it.

    fp32 uses this process's settings: by PyTorch's default a GPU's convolutions use TF32, its matrix products do not.
    Precisions that the device only emulates are measured with smaller problems. On a CPU each of PyTorch's threads
    works on problems of its own, at the same time, and their rates are added (see `timing`).

    Args:
        device: device to measure.
        precisions: precisions of operands and results.
        budget_seconds: duration of all measurements. The first climb always completes, about 0.3 s for a kind of work
            and precision, and first calls may compile.

    Returns:
        The two rates for every precision; None, with the reason, for an operator that the device does not support.
    """
    with warnings.catch_warnings(action="ignore"):
        members = run_threaded(device, lambda: _climb(device, precisions, budget_seconds))
    return tuple(map(_together, zip(*members, strict=True)))


def _climb(device: torch.device, precisions: Sequence[Precision], budget_seconds: float) -> list[Throughput]:
    """Return what the calling thread measures."""
    ladders = [
        {kind: _ladder(problems, device, DTYPES[precision]) for kind, problems in _KINDS.items()}
        for precision in precisions
    ]
    with torch.no_grad():
        autorange([ladder for kinds in ladders for ladder in kinds.values()], budget_seconds)
    return [
        Throughput(
            precision=precision,
            matmul_flops=kinds["matrix product"].rate,
            conv_flops=kinds["convolution"].rate,
            reason="; ".join(f"{kind}: {ladder.refusal}" for kind, ladder in kinds.items() if ladder.rate is None),
        )
        for precision, kinds in zip(precisions, ladders, strict=True)
    ]


def _together(members: Sequence[Throughput]) -> Throughput:
    """Return the sum of what threads measured at the same time; all threads support the same operators."""
    matmul = [member.matmul_flops for member in members if member.matmul_flops is not None]
    conv = [member.conv_flops for member in members if member.conv_flops is not None]
    return Throughput(
        precision=members[0].precision,
        matmul_flops=sum(matmul) or None,
        conv_flops=sum(conv) or None,
        reason=members[0].reason,
    )


def _ladder(problems: Sequence[Problem], device: torch.device, dtype: torch.dtype) -> Autorange:
    """Return the problems with random operands on `device`, which are created on first use."""
    clock, calls = DeviceClock(device), dict[int, Work]()
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def seconds_of(rung: int) -> float:
        if rung not in calls:
            calls[rung] = problems[rung].prepare(random)
        return clock.time(calls[rung])

    return Autorange([problem.flops for problem in problems], seconds_of)


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
