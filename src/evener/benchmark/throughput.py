"""How many FLOP/s a device does at each precision: square matrix products and 3x3 convolutions of growing size.

    rung 0, 1, 2 ...         ever larger problems of one kind, each timed on the way up
    climb on while           a call is short (below 2 ms), or is longer but its rate well above that of the rung below
    the top                  the lowest rung from which it is not worth while to climb on, as far as is known
    until the time is over   on one ladder after the other, time the top and the two rungs below it again, find the top
                             anew, and climb on if that is worth while now
    the answer               the highest rate among these three and what is above

The seconds of a rung are the lower quartile of its calls. A busy machine makes many a call slower, so the mean would
not repeat; a few are faster than they can be for long, while a neighbour that shares the core happens to pause, so the
least would not either. Where to stop is decided anew by the quartile, not by one unlucky call.

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

_GAIN_WORTH_A_CALL_OF = ((0.002, 0.0), (0.030, 1.1))
"""(seconds, gain): a call shorter than so many seconds is followed by a larger one if it gained so much in rate."""
_LONG_CALL = 0.005
_RUNGS_REPEATED = 3
_LEAST_ROUNDS = 4

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

Work = Callable[[], object]
Random = Callable[..., Tensor]


class Autorange:
    """Ever larger problems of one kind.

    Args:
        flops: of one call at every rung, increasing.
        seconds_of: runs the problem of a rung once and returns its seconds. If it raises RuntimeError or TypeError, the
            ladder ends below that rung (out of memory); at rung 0 the device refuses this kind of work.
    """

    def __init__(self, flops: Sequence[float], seconds_of: Callable[[int], float]) -> None:
        self.refusal = ""
        self._flops, self._seconds_of = flops, seconds_of
        self._height = len(flops)
        self._times: list[list[float]] = []

    @property
    def rate(self) -> float | None:
        """FLOP/s, as known by now; None where the device refuses the work, as `refusal` says."""
        return max(self._rates()[self._lowest() :], default=None)

    def climb(self) -> None:
        """Time the next rungs, as far as worth while."""
        while len(self._times) < self._height and self._top() == len(self._times):
            try:
                self._times.append(self._first_times(len(self._times)))
            except (RuntimeError, TypeError) as error:
                self._height = len(self._times)
                self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__

    def repeat(self) -> None:
        """Time the top rungs again, and climb on if that made them look better."""
        for rung in range(len(self._times))[self._lowest() : self._top() + 1]:
            insort(self._times[rung], self._seconds_of(rung))
        self.climb()

    def _first_times(self, rung: int) -> list[float]:
        """Of the first call, or of the second where the first was long: it may have had to compile."""
        seconds = self._seconds_of(rung)
        return [seconds if seconds < _LONG_CALL else min(seconds, self._seconds_of(rung))]

    def _quartiles(self) -> list[float]:
        return [times[len(times) // 4] for times in self._times]

    def _rates(self) -> list[float]:
        return [flops / seconds for flops, seconds in zip(self._flops, self._quartiles(), strict=False)]

    def _lowest(self) -> int:
        """The lowest rung that is repeated."""
        return max(0, min(self._top(), len(self._times) - 1) - _RUNGS_REPEATED + 1)

    def _top(self) -> int:
        """The lowest rung from which it is not worth while to climb on, or else the first that was not timed."""
        below = 0.0
        for rung, (seconds, rate) in enumerate(zip(self._quartiles(), self._rates(), strict=True)):
            if not any(seconds < limit and rate > enough * below for limit, enough in _GAIN_WORTH_A_CALL_OF):
                return rung
            below = rate
        return len(self._times)


def autorange(
    ladders: Sequence[Autorange], budget_seconds: float, now: Callable[[], float] = time.perf_counter
) -> None:
    """Climb every ladder, then repeat them in turn until the time (by the clock `now`) is over, four times at least."""
    start = now()
    for ladder in ladders:
        ladder.climb()
    for count, ladder in enumerate(cycle(ladders)):
        if count >= _LEAST_ROUNDS * len(ladders) and now() - start >= budget_seconds:
            return
        ladder.repeat()


class Problem(NamedTuple):
    """One call that can be timed.

    Attributes:
        flops: of the call; a multiply-add counts two.
        prepare: (maker of random operands of a shape) -> the call.
    """

    flops: float
    prepare: Callable[[Random], Work]


def matrix_product(n: int) -> Problem:
    """The product of two n x n matrices."""

    def prepare(random: Random) -> Work:
        a, b, out = random(n, n), random(n, n), random(n, n)
        return lambda: torch.mm(a, b, out=out)

    return Problem(2.0 * n**3, prepare)


def convolution(samples: int, channels: int, height: int) -> Problem:
    """A 3x3 convolution of images (N, C, H, H) to as many channels, padded to keep H."""

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
    """FLOP/s of `device` at some precisions, the best over sizes that fill it.

    fp32 is what this process is set to: by PyTorch's default a GPU's convolutions use TF32, its matrix products do not.
    What the device only emulates is measured like the rest, with smaller problems. On a CPU each of PyTorch's threads
    works on problems of its own, at the same time, and their rates are added (see `timing`).

    Args:
        device: to measure.
        precisions: of operands and results.
        budget_seconds: for all together. The climb takes its time all the same, some 0.3 s for a kind of work and
            precision, and so does what has to be compiled at a first call.

    Returns:
        For every precision the two rates; None, with the reason, for an operator that the device refuses.
    """
    with warnings.catch_warnings(action="ignore"):
        members = run_threaded(device, lambda: _climb(device, precisions, budget_seconds))
    return tuple(map(_together, zip(*members, strict=True)))


def _climb(device: torch.device, precisions: Sequence[Precision], budget_seconds: float) -> list[Throughput]:
    """What the calling thread measures."""
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
    """The sum of what threads measured at the same time; all of them are refused the same operators."""
    matmul = [one.matmul_flops for one in members if one.matmul_flops is not None]
    conv = [one.conv_flops for one in members if one.conv_flops is not None]
    return Throughput(
        precision=members[0].precision,
        matmul_flops=sum(matmul) or None,
        conv_flops=sum(conv) or None,
        reason=members[0].reason,
    )


def _ladder(problems: Sequence[Problem], device: torch.device, dtype: torch.dtype) -> Autorange:
    """The problems with random operands on `device`, made when first needed."""
    clock, calls = DeviceClock(device), dict[int, Work]()
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def seconds_of(rung: int) -> float:
        if rung not in calls:
            calls[rung] = problems[rung].prepare(random)
        return clock.time(calls[rung])

    return Autorange([problem.flops for problem in problems], seconds_of)
