"""What a program draws: for samples every node by itself, for weights all nodes alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.frontends.programs.entry import finish
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from programs.suite import perform, run_of

NOISE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

run = evener.join()

class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=0.01)

model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = Langevin(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
masks = []
for epoch in run.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        masks.append(torch.rand(x.shape[0])[:3])
        F.mse_loss(model(x + 0.01 * torch.randn_like(x)), y).backward()
        for weight in model.parameters():
            weight.grad += 0.01 * torch.randn_like(weight)
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.01 * torch.randn_like(weight)
results = {**model.state_dict(), "masks": torch.cat(masks)}
"""


def rank_of_noise(env: RankEnvironment, folder: str) -> None:
    """A rank that writes its weights."""
    run = run_of(env, "3,1")
    torch.save(perform(NOISE, "noise").values, Path(folder) / f"{env.rank}.pt")
    finish(run, env)


@pytest.mark.timeout(100)
def test_weight_noise_is_equal_on_nodes_and_sample_noise_differs(tmp_path: Path) -> None:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    run_local(rank_of_noise, nodes, str(tmp_path), patience=10, on_event=lambda _: None)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(first.pop("masks"), second.pop("masks"))
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=1e-12, atol=1e-12)
