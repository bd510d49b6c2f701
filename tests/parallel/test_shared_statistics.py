"""Norms that are functions have the statistics of all ranks, of whatever shares, one of them empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.comm.group import Group
from evener.parallel.shared_statistics import SharedStatistics
from support.thread_ranks import together

SHARES = (4, 0, 1)


def _pass(norm: Any, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, mean, var = images.clone().requires_grad_(), torch.zeros(3).double(), torch.ones(3).double()
    y = norm(x, mean, var)
    (y.tanh() * torch.arange(6.0)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, mean, var


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True, momentum=0.3),
        lambda x, mean, var: F.batch_norm(x, mean, var, training=False),
        lambda x, mean, var: F.batch_norm(x, None, None, training=True),
        lambda x, mean, var: F.instance_norm(x, mean, var, momentum=0.3),
    ],
)
def test_functional_norms_equal_one_process(norm: Any) -> None:
    images = torch.randn(5, 3, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = _pass(norm, images)

    def check(group: Group) -> None:
        start, count = sum(SHARES[: group.rank]), SHARES[group.rank]
        shared = SharedStatistics(lambda _: group)
        shared.counting = count > 0
        own = images[start : start + count] if count else images[:1]
        with shared:
            y, grad, mean, var = _pass(norm, own)
        torch.testing.assert_close((mean, var), expected[2:])
        if count:
            torch.testing.assert_close((y, grad), tuple(part[start : start + count] for part in expected[:2]))

    together(3, check)
