"""How many FLOP/s a device does at each precision: a square matrix product and a 3x3 convolution.

Shape letters: N samples, C channels (in and out), H rows and columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.benchmark.autorange import Autorange, autorange
from evener.benchmark.timing import DeviceClock, run_threaded
from evener.errors import require
from evener.profile import PRECISIONS, Precision, Throughput

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

Work = Callable[[], object]
Random = Callable[..., Tensor]


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
    """FLOP/s of `device` at some precisions, the best over sizes that fill it (see `autorange`).

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

    Raises:
        InvalidValue: an unknown precision, or a budget that is not positive.
    """
    for precision in precisions:
        require(precision in DTYPES, "precision", precision, f"one of {', '.join(PRECISIONS)}")
    require(budget_seconds > 0, "budget_seconds", budget_seconds, "positive")
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
