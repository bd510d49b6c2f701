"""Changes in place, through views, slices and `out=`, give divided layers what they give one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.op_graph import op_graph
from evener.records.errors import InvalidInput
from support.compare_divided import hold_against, train
from support.refusals import refused
from support.thread_ranks import together


class Changing(nn.Module):
    """Changes what it computes in every way that PyTorch allows."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        part, other = y[:, :3], y[:, 3:]
        part.mul_(1.5)
        y[:, :2] += 1
        y[:, 1:3] += other[:, :2]
        y[:, :, 0] = 0
        y.narrow(2, 1, 3).zero_()
        y.permute(0, 2, 3, 1).add_(torch.arange(6, dtype=x.dtype))
        flat = y.view(len(x), -1)
        flat.tanh_()
        out = torch.empty_like(y)
        out[..., ::2], out[..., 1::2] = y[..., 1::2] + part.mean(), y[..., ::2]
        with torch.no_grad():
            shift = torch.empty_like(y)
            torch.mul(y, 0.1, out=shift)
            self.seen[:4] += y.mean((0, 2, 3))[:4]
        return self.head(out - shift + other.repeat(1, 2, 1, 1)).flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("division", ["filter", "spatial"])
def test_in_place_changes_equal_one_process(division: Any) -> None:
    torch.manual_seed(0)
    expected = train(Changing().double(), (2, 3, 6, 6))
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(2, 1)),))
    together(2, lambda group: hold_against(group, expected, arrangement, [2]))


class Model(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(4, 4), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x))


def _through_what_is_detached(y: Tensor) -> Tensor:
    y.detach()[:, :2].relu_()
    return y


def _without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        y[:, 0] = 0
    return y


def _of_values_that_lie_apart(y: Tensor) -> Tensor:
    z = y.new_empty_strided((3, 4), (1, 5)).copy_(y)
    z[:, 0].relu_()
    return z


@pytest.mark.parametrize("code", [_through_what_is_detached, _without_gradients, _of_values_that_lie_apart])
def test_untraceable_in_place_changes_are_refused_with_their_line(code: Any) -> None:
    with refused(InvalidInput):
        op_graph(Model(code), [torch.zeros(3, 4)])


def test_unread_old_values_add_no_operations() -> None:
    def code(y: Tensor) -> Tensor:
        y.mul_(2)[:, 0].detach()
        return y.relu_()

    names = [operation.name for operation in op_graph(Model(code), [torch.zeros(3, 4)]).network.operations]
    assert names == ["input_0", "linear", "mul_()", "relu_()", "output"]
