"""What ends a rank on one machine is what the others say, too, where a user looks: not that a connection broke."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from evener.launch.rank_heartbeat import RankHeartbeat
from evener.records.errors import MissingFile, NodeLost
from support.stores import memory_store
from support.two_machines import on_two_machines

TASK = """\
import os
from torch import nn
from tiny import data, model
from evener import Task

def train_data():
    if os.environ["RANK"] == "1":
        open("x.pt")
    return data(500, 1)

task = Task(model=model, loss=nn.functional.cross_entropy, train_data=train_data, batch_size=20, epochs=50)
"""
MISSING = TASK.replace('open("x.pt")', "raise MissingFile(\"no file 'x.pt'\")").replace(
    "from evener import Task\n", "from evener import Task\nfrom evener.records.errors import MissingFile\n"
)
PROGRAM = """\
import os
import torch
import evener

run = evener.join()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.randint(0, 2, (640,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
steps = 0
while True:
    for inputs, targets in loader:
        steps += 1
        if steps == 40 and os.environ["GROUP_RANK"] == "1":
            open("x.pt")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("-m", "evener", "train", "../task.py", "--output", "run"), id="task"),
        pytest.param(
            ("-m", "evener", "run", "--run-folder", "run", "../program.py"),
            id="program of evener run",
            marks=pytest.mark.slow,
        ),
        pytest.param(("../program.py",), id="program", marks=pytest.mark.slow),
    ],
)
def test_first_machine_names_the_file_missing_on_the_second(words: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "program.py").write_text(PROGRAM)
    (code, errors), (_, other) = on_two_machines(words, tmp_path)
    assert code == NodeLost.exit_code, errors
    told = [line for line in errors.splitlines() if line.startswith("evener: ")][-1]
    assert "(rank 1) failed: FileNotFoundError" in told
    assert "'x.pt'" in told
    assert "Traceback" not in errors
    assert "FileNotFoundError" in other


@pytest.mark.slow
def test_first_machine_names_the_data_missing_on_the_second(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(MISSING)
    words = ("-m", "evener", "train", "../task.py", "--output", "run")
    (code, errors), (other_code, other) = on_two_machines(words, tmp_path)
    assert (code, other_code) == (NodeLost.exit_code, MissingFile.exit_code)
    assert "no file 'x.pt'" in errors
    assert "no file 'x.pt'" in other


def heartbeats(patience: float, lost: list[NodeLost]) -> list[RankHeartbeat]:
    """Of two ranks, of which what the first is told goes into `lost`."""
    store = memory_store()
    return [
        RankHeartbeat(store, rank=rank, nodes=["a", "b"], patience=patience, on_lost=lost.append) for rank in (0, 1)
    ]


def test_first_reported_failure_is_the_cause() -> None:
    first, second = heartbeats(60.0, [])
    assert first.cause() == ""
    second.report_failure("node b failed: x.pt")
    first.report_failure("node a failed: the connection to b broke")
    assert first.cause() == "node b failed: x.pt"


def test_shared_failure_leaves_ranks_time_to_raise_it() -> None:
    lost: list[NodeLost] = []
    first, second = heartbeats(60.0, lost)
    second.report_failure("node b failed: x.pt", is_shared=True)
    assert first.cause() == "node b failed: x.pt"
    first.start()
    first.join(timeout=0.8)
    assert lost == []
    first.join(timeout=10)
    assert [str(one) for one in lost] == ["node b failed: x.pt"]
