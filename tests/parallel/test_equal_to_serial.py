"""Uneven data parallelism gives the outputs, gradients, weights and running statistics of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.comm.group import Group
from evener.comm.joining import join_group, leave_group
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.parallel.shared_statistics import SharedStatistics, statistics_exchanges, synchronise_norms

STEPS = 3


class Block(nn.Module):
    """A residual block, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs, momentum=None)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def residual_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6, affine=False),
        Block(6, 8, 1),
        Block(8, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
        nn.BatchNorm1d(10, track_running_stats=False),
        nn.Linear(10, 5),
    )


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, 8, 8, generator=draw).to(dtype) * 3 + 5, torch.randint(0, 5, (10,), generator=draw)


def serial(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the first step, and the state after STEPS steps, of one process."""
    model, (x, y) = residual_net().to(dtype), batch(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward()  # type: ignore[no-untyped-call]
        outputs.append(out.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return outputs, gradients, {k: v.clone() for k, v in model.state_dict().items()}


def compare(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: train its shares and hold everything against one process."""
    dtype = getattr(torch, order["dtype"])
    group = join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=30)
    outputs, gradients, state = serial(dtype)
    (x, y), shares = batch(dtype), order["shares"]
    start, count = sum(shares[: group.rank]), shares[group.rank]
    model = synchronise_norms(residual_net().to(dtype), group)
    run = one_pass(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = run(x[start : start + count], y[start : start + count], x, y)
        close(out, outputs[step][start : start + count], dtype, f"outputs of step {step}")
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        close(own, gradients[step], dtype, f"gradients of step {step}")
        optimizer.step()
    for name, value in model.state_dict().items():
        close(value, state[name], dtype, name)
    assert list(model.state_dict()) == list(state)
    leave_group()


def one_pass(model: nn.Module, group: Group) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Forward and backward of this rank's samples, or of a stand-in where it has none; gives the outputs."""
    outputs = torch.empty(0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal outputs
        outputs = out.detach()
        return F.cross_entropy(out, y)

    parallel = ReplicatedModel(model, group, Criterion(loss=loss, autocast=nullcontext, scale=lambda one: one))

    def run(x: Tensor, y: Tensor, all_x: Tensor, all_y: Tensor) -> Tensor:
        given = (x, y) if len(x) else (all_x[:1], all_y[:1])
        parallel.add_gradients(*given, samples=len(x), total=len(all_x), is_last=True)
        return outputs[: len(x)]

    return run


def close(value: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((value - expected).abs().max()) / scale if expected.numel() else 0.0
    assert value.shape == expected.shape
    assert error <= tolerance, f"{what}: {error}"


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shares",
    [(9, 0, 1), (3, 1, 1, 5), *(pytest.param(shares, marks=pytest.mark.slow) for shares in ((7, 2, 1), (5, 5)))],
    ids=str,
)
def test_uneven_shares_equal_one_process(shares: tuple[int, ...], dtype: str) -> None:
    nodes = [NodeSpec(name=f"n{i}", threads=1) for i in range(len(shares))]
    run_local(compare, nodes, {"shares": shares, "dtype": dtype}, patience=30, on_event=print)


def unnormalised(env: RankEnvironment, order: str) -> None:
    """The checker itself: without synchronised statistics the same comparison has to fail."""
    group = join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=30)
    _, gradients, _ = serial(torch.float64)
    x, y = batch(torch.float64)
    own = slice(0, 7) if group.rank == 0 else slice(7, 10)
    model = residual_net().double()
    with patch.object(
        SharedStatistics,
        "__torch_function__",
        lambda _, function, __, args=(), kwargs=None: function(*args, **kwargs or {}),
    ):
        one_pass(model, group)(x[own], y[own], x, y)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    Path(f"{order}-{env.rank}").write_text(str(float((found - gradients[0]).abs().max())))
    leave_group()


def test_comparison_detects_statistics_of_one_rank_only(tmp_path: Path) -> None:
    nodes = [NodeSpec(name=f"n{i}", threads=1) for i in range(2)]
    run_local(unnormalised, nodes, str(tmp_path / "error"), patience=30, on_event=print)
    assert float((tmp_path / "error-0").read_text()) > 1e-3


def alone() -> Group:
    return join_group(rank=0, nodes=["n0"], device=torch.device("cpu"), store=None, patience=1)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 5, 3), (2, 4, 3, 3, 2)])
def test_synchronised_norm_on_one_rank_equals_batch_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](4).double()
    ours = synchronise_norms(type(plain)(4).double(), alone())
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(shape, dtype=torch.float64)
    (plain(a) * weight).sum().backward()
    (ours(b) * weight).sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-10)
    plain.eval(), ours.eval()
    torch.testing.assert_close(ours(x), plain(x))


def test_large_means_lose_no_precision() -> None:
    x = torch.randn(64, 3, 4, 4) * 0.01 + 1000
    ours = synchronise_norms(nn.BatchNorm2d(3), alone())
    expected = F.batch_norm(x.double(), None, None, training=True).float()
    assert float((ours(x).detach() - expected).abs().max()) < 0.02


def test_single_value_per_channel_is_refused_as_in_pytorch() -> None:
    with pytest.raises(ValueError, match="more than one value per channel in training, got 1"):
        synchronise_norms(nn.BatchNorm1d(3), alone())(torch.zeros(1, 3))


def test_half_precision_inputs_keep_their_type() -> None:
    ours = synchronise_norms(nn.BatchNorm2d(3), alone())
    assert ours(torch.randn(4, 3, 2, 2).bfloat16()).dtype == torch.bfloat16


def test_exchanges_are_counted_before_and_after_replacing_norms() -> None:
    model = residual_net()
    before = statistics_exchanges(model)
    assert before == statistics_exchanges(synchronise_norms(model, alone()))
    channels = 6 + 3 * 8 + 3 * 12 + 10
    assert before == (2 * 8, (4 * channels + 8) * 4)
