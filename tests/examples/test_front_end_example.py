"""The example of a front end trains on uneven nodes what one process trains (docs/adding-a-front-end.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "19_own_trainer.py"


def trained(folder: Path, *words: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that the example writes in `folder`, and its lines about epochs."""
    folder.mkdir()
    typed = [sys.executable, *(["-m", "evener", "run"] if words else []), str(EXAMPLE), *words]
    done = subprocess.run(
        typed, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    return torch.load(folder / "model.pt", weights_only=True), lines


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "shares"), [("1,1", "3,1"), pytest.param("1,1,1", "5,2,0", marks=pytest.mark.slow)])
def test_front_end_example_equals_one_process(nodes: str, shares: str, tmp_path: Path) -> None:
    alone, said_alone = trained(tmp_path / "alone")
    weights, said = trained(tmp_path / "nodes", "--local-nodes", nodes, "--shares", shares)
    assert len(said) == 5
    assert said == said_alone
    assert weights.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10)
