"""Peak activations of a pipeline's stages over N, L, K, M, counted in their processes, and GPipe's rule fitted to them.

    peak = a N + b (L/K + c) N/M            O(N + L/K * N/M), Huang et al., 2019, section 2.3

N samples, L layers, K stages, M micro-batches. `a` is what comes in for a sample at a stage, `b` what a layer keeps of
one; `c` stands for what besides the L/K layers of a stage is there of a micro-batch: transient tensors, and those on
their way to and from the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn, zeros

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group
from evener.oracle.schedule import Rematerialise
from evener.parallel.pipeline.pipeline import Pipeline

TOKENS, DIM = 64, 16
"""Of a sample: activations are much larger than the gradients of a layer's weights."""


class Layer(nn.Module):
    """The feed-forward half of a Transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return outputs


class Size(NamedTuple):
    """One size of everything."""

    samples: int
    layers: int
    stages: int
    micro_batches: int


class Peak(NamedTuple):
    """What the fullest stage held at the peak of a step of that size, the batch itself included."""

    size: Size
    nbytes: int


class Fit(NamedTuple):
    """The rule's coefficients in bytes (`c`: in layers), its R^2, and the largest error relative to the peak."""

    a: float
    b: float
    c: float
    determination: float
    worst: float

    def bytes_of(self, size: Size) -> float:
        """What the rule says of a size."""
        micro_batch = size.samples / size.micro_batches
        return self.a * size.samples + self.b * (size.layers / size.stages + self.c) * micro_batch


def grid(
    samples: Sequence[int], layers: Sequence[int], stages: Sequence[int], micro_batches: Sequence[int]
) -> list[Size]:
    """Every combination."""
    return [Size(*size) for size in product(samples, layers, stages, micro_batches)]


def measure_peaks(group: Group, sizes: Sequence[Size], policy: Rematerialise) -> list[Peak]:
    """Of every size, on as many first ranks of `group` as it has stages; every rank of it calls this."""
    teams = {stages: group.subgroup(range(stages)) for stages in sorted({size.stages for size in sizes})}
    own = [_peak(teams[size.stages], size, policy) for size in sizes]
    rows = [list(map(int, row.split())) for row in group.all_gather_bytes(" ".join(map(str, own)).encode())]
    return [Peak(size, max(row)) for size, row in zip(sizes, zip(*rows, strict=True), strict=True)]


def _peak(group: Group | None, size: Size, policy: Rematerialise) -> int:
    """Of this rank; 0 if it has no stage."""
    if group is None:
        return 0
    model = nn.Sequential(*(Layer() for _ in range(size.layers)))
    x = zeros(size.samples, TOKENS, DIM)
    pipeline = Pipeline(
        model, x, F.mse_loss, stages=[str(size.layers * k // size.stages) for k in range(1, size.stages)], on=group,
        micro_batches=size.micro_batches, schedule="gpipe", rematerialise=policy,
    )  # fmt: skip
    pipeline.step(x, x)
    with LiveBytes() as live:
        pipeline.step(x, x)
    return int(live.peak) + (x.nbytes if pipeline.is_first else 0)


def fitted(peaks: Sequence[Peak]) -> Fit:
    """The rule, by least squares."""
    parts = np.array([(n, layers / stages * n / m, n / m) for (n, layers, stages, m), _ in peaks], dtype=np.float64)
    measured = np.array([peak.nbytes for peak in peaks], dtype=np.float64)
    (a, b, beside), *_ = np.linalg.lstsq(parts, measured)
    errors = measured - parts @ (a, b, beside)
    determination = 1 - np.square(errors).sum() / np.square(measured - measured.mean()).sum()
    return Fit(float(a), float(b), float(beside / b), float(determination), float(np.abs(errors / measured).max()))
