"""Random numbers on accelerators: local for samples, shared for whole batches, also among devices of several kinds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.alike_draws import AlikeDraws
from evener.frontends.programs.random_state import take_leaders_state
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.system import accelerators
from evener.system.processor_draws import ProcessorDraws
from evener.training.draws import SameDraws
from support.accelerator import DEVICE, NEEDS_DEVICE, devices
from support.commands import evener

pytestmark = [*NEEDS_DEVICE, pytest.mark.timeout(300)]
OTHER = "standin:1" if DEVICE.startswith("standin") else DEVICE


def drawn(seed: int, on: str, samples: int, *, on_processor: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the numbers that a node draws for whole batches, and those for its own samples."""
    device, model = torch.device(on), nn.Dropout(0.5)
    shared, own = list[Tensor](), list[Tensor]()
    for generator in accelerators.generators(device):
        generator.manual_seed(3)
    draws = AlikeDraws(seed, [(3, 4)], [model], device=device, on_processor=on_processor)
    draws.begin()
    try:
        for _ in range(3):
            own += [torch.rand(samples, 8, device=device), model(torch.ones(samples, 64, device=device))]
            shared += [torch.rand((), device=device), torch.randn(3, 4, device=device), torch.rand(1)]
            shared.append(F.dropout(torch.ones(3, 4, device=device), inplace=True))
            shared.append(torch.zeros(1, device=device).uniform_())
    finally:
        draws.end()
    return [one.cpu() for one in shared], [one.cpu() for one in own]


@pytest.mark.parametrize("on_processor", [False, True])
def test_nodes_share_coins_and_draw_their_own_masks(on_processor: bool) -> None:
    shared, own = drawn(0, DEVICE, 2, on_processor=on_processor)
    other, others_own = drawn(1, "cpu" if on_processor else OTHER, 5, on_processor=on_processor)
    assert all(torch.equal(a, b) for a, b in zip(shared, other, strict=True))
    assert len({float(one.sum()) for one in shared}) > 12
    assert all(not torch.equal(a, b[:2]) for a, b in zip(own, others_own, strict=True))


def test_leaders_state_contains_the_generator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    group = Group(rank=0, size=1, device=device, nodes=["node-0"], timer=StepTimer(device))
    sent: list[bytes] = []

    def broadcast(_group: Group, message: bytes, _topic: str) -> bytes:
        sent.append(message)
        return message

    monkeypatch.setattr(Group, "broadcast", broadcast)
    take_leaders_state(group)
    expected = torch.rand(3, device=device)
    monkeypatch.setattr(Group, "broadcast", lambda *_: sent[0])
    take_leaders_state(group)
    assert torch.equal(torch.rand(3, device=device), expected)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "a number of all": lambda x: torch.rand((), device=x.device) * x,
    "noise": lambda x: x + torch.randn_like(x),
    "in place": lambda x: torch.empty_like(x).exponential_(),
    "random slopes": lambda x: F.rrelu(x, training=True),
    "into another tensor": lambda x: torch.rand(x.shape, dtype=x.dtype, out=torch.empty_like(x)),
    "by probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "categories": lambda x: torch.multinomial(x.softmax(1), 2),
    "an order": lambda x: x[torch.randperm(len(x), device=x.device)],
}


@pytest.mark.parametrize("make_mode", [ProcessorDraws, SameDraws])
@pytest.mark.parametrize("name", DRAWS)
def test_devices_of_two_kinds_draw_the_same(name: str, make_mode: Callable[[], Any]) -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4).double()
    found = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(4)
        torch.default_generator.manual_seed(4)
        own = x.to(device).requires_grad_()
        with make_mode():
            made = DRAWS[name](own)
        if made.requires_grad:
            made.sum().backward()  # type: ignore[no-untyped-call]
        found.append((made.detach().cpu(), None if own.grad is None else own.grad.cpu()))
    torch.testing.assert_close(*[one for one, _ in found], rtol=1e-12, atol=1e-12)
    if found[0][1] is not None:
        torch.testing.assert_close(*[grad for _, grad in found], rtol=1e-12, atol=1e-12)


TASK = """
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def data() -> TensorDataset:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())

def task() -> Task:
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    return Task(
        name="drops", model=lambda: nn.Sequential(*layers), loss=nn.functional.cross_entropy,
        train_data=data, batch_size=10, epochs=1,
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--shares", "1,1"), ("--strategy", "filter"), ("--strategy", "pipeline")])
def test_task_with_dropout_trains_on_devices_of_two_kinds(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "drops.py").write_text(TASK)
    on = devices("gpu", "cpu")
    ran = evener("train", "drops.py", "--devices", on, *words, "--output", "out", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    plan = read_noun(tmp_path / "out" / "record.json", TrainRecord).plan
    assert plan.check is not None


PROGRAM = """
import sys, evener, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(3)
    run = evener.join()
    rows = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    loader = DataLoader(rows, batch_size=12, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    drawn = []
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            inputs, targets = inputs.to(run.device), targets.to(run.device)
            optimizer.zero_grad()
            inputs = inputs + torch.randn_like(inputs)
            drawn.append(inputs.detach().cpu())
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    torch.save((torch.stack(drawn), model.state_dict()), f"{sys.argv[1]}-{run.rank}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", [("gpu", "cpu"), ("gpu", "other")])
def test_nodes_that_divide_layers_draw_the_same(tmp_path: Path, on: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    where = devices(*on).replace("other", OTHER)
    words = ("--devices", where, "--strategy", "filter", "--shares", "1,1")
    ran: subprocess.CompletedProcess[str] = evener("run", *words, "program.py", "made", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    (inputs, weights), (others, others_weights) = (
        torch.load(tmp_path / f"made-{rank}", map_location="cpu") for rank in range(2)
    )
    assert torch.equal(inputs, others)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others_weights[name], rtol=1e-5, atol=1e-6)
