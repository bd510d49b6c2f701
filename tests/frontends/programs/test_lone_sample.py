"""A program whose last batch has one sample, which BatchNorm cannot take, ends before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import evener_here

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evener

run = evener.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), {norm}(8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(21, 6), torch.arange(21) % 3), batch_size=10)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        print("stepped")
"""


@pytest.mark.parametrize(
    ("norm", "code"), [("nn.BatchNorm1d", 2), pytest.param("nn.LayerNorm", 0, marks=pytest.mark.slow)]
)
def test_a_last_batch_of_one_sample_is_known_before_the_first_step(tmp_path: Path, norm: str, code: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(norm=norm))
    ended = evener_here("run", "--local-nodes", "1,1", "--shares", "3,1", "program.py", cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert ("stepped" in ended.stdout) == (code == 0)
    assert ("drop_last=True" in ended.stderr) == (code == 2)
