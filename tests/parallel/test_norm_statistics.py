"""Mean and variance of channels on a processor: the same in every memory layout, however large, with all digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evener.parallel.norm_statistics import channel_statistics

SHAPES = {
    "rows of several blocks": (2, 3, 400, 400),
    "rows that blocks do not divide": (3, 7, 61, 67),
    "blocks of many rows": (5, 64, 20, 20),
    "rows too short for blocks": (6, 4, 5, 5),
    "no pixels": (40, 6),
    "a sequence": (4, 3, 1000),
    "a volume": (2, 3, 4, 12, 9),
}


def layouts(x: Tensor) -> dict[str, Tensor]:
    """`x` as it may lie in memory."""
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return {"contiguous": x, "channels last": last, "a part of others": torch.cat((x, x), 1)[:, : x.shape[1]]}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_statistics_equal_numpy_in_every_memory_layout(shape: tuple[int, ...], dtype: torch.dtype, most: float) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + 30).to(dtype)
    exact = x.double().numpy()
    axes = tuple(dim for dim in range(len(shape)) if dim != 1)
    wanted = [*exact.mean(axes), *exact.var(axes), exact.size / shape[1]]
    for layout, own in layouts(x).items():
        found = channel_statistics(own)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), torch.tensor(wanted), rtol=most, atol=0, msg=layout)


def test_uncounted_samples_have_statistics_and_count_zero() -> None:
    assert channel_statistics(torch.ones(2, 3, 20, 20), counted=False).tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert channel_statistics(torch.ones(0, 3, 20, 20)).tolist() == [0] * 7
