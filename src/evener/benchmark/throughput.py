"""Measures a device's FLOP/s at each precision: square matrix products and 3x3 convolutions of increasing size.

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
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.benchmark.timing import DeviceClock, run_threaded
from evener.records.profile import Precision, Throughput

_MIN_GAINS_BY_SECONDS = ((0.002, 0.0), (0.030, 1.1))
"""(seconds, gain): a call shorter than `seconds` is followed by a larger one if its rate grew by `gain`."""
_LONG_CALL = 0.005
_RUNGS_REPEATED = 3
_MIN_ROUNDS = 4

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
        if count >= _MIN_ROUNDS * len(ladders) and now() - start >= budget_seconds:
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
