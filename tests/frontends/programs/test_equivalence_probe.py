"""Copies that are compared compile nothing: that would take longer than all else that they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import evener

PROGRAM = """
import os
import evener
import torch
from torch import nn

def noting(module, _examples):
    with open("compiled.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return module.forward

run = evener.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
compiled = torch.compile(model, backend=noting)
for epoch in run.epochs(3):
    x, y = run.share((torch.randn(12, 4).double(), torch.randn(12, 1).double()))
    loss = nn.functional.mse_loss(compiled(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(run.sum(os.getpid()))
"""


@pytest.mark.slow
def test_only_training_processes_compile(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("run", "program.py", "--local-nodes", "1,1", "--shares", "2,1", "--run-folder", "out")
    result = evener(*words, cwd=tmp_path, timeout=170)
    assert result.returncode == 0, result.stderr
    compiling = {int(line) for line in (tmp_path / "compiled.txt").read_text().split()}
    assert len(compiling) == 2
    assert sum(compiling) == int(result.stdout)
    assert json.loads((tmp_path / "out" / "record.json").read_text())["plan"]["check"]["off"] < 1e-9


WITHOUT_COMPILERS = """
import sys
import torch
from evener.frontends.programs.equivalence_probe import _compile_nothing

_compile_nothing()

@torch.compile(dynamic=True)
def twice(x):
    return 2 * x

assert torch.compile(abs)(-1) == 1 and twice(2) == 4
print([name for name in sys.modules if name.startswith("torch._inductor")])
"""


@pytest.mark.slow
def test_probe_wraps_functions_without_importing_compilers() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_COMPILERS], capture_output=True, text=True, timeout=100)
    assert result.stdout == "[]\n", result.stderr
