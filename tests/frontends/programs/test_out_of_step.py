"""Nodes whose program does different things at the same time: the run ends, and says which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from evener.comm import message_topics
from evener.frontends.programs.entry import finish
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.errors import EvenerError, OutOfStep
from programs.suite import perform, run_of

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

run = evener.join()

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            if self.training and DROP and epoch and step and run.rank:  # as a value of its own samples decides
                continue
            x = x + block(x)
        return self.head(x)

DROP = {drop}
model = Network()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(4):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if epoch and step and run.rank == {node}:  # as a loss of the node's own samples decides
            {decision}
        loss.backward()
        optimizer.step()
    {afterwards}
results = dict()
"""


def rank_of_program(env: RankEnvironment, work: tuple[str, str]) -> None:
    """A rank that writes to which calls the nodes had come."""
    text, folder = work
    run = run_of(env, "3,1")
    try:
        perform(text, "program")
        finish(run, env)
    except OutOfStep as error:
        (Path(folder) / f"{env.rank}.json").write_text(json.dumps(error.calls))
        raise


def calls_of(text: str, folder: Path) -> Mapping[str, str]:
    """To what calls the nodes of a program had come when one of them found it out."""
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    with pytest.raises(EvenerError) as raised:
        run_local(rank_of_program, nodes, (text, str(folder)), patience=10, on_event=lambda _: None)
    assert raised.value.exit_code == OutOfStep.exit_code
    found: Mapping[str, str] = json.loads(next(folder.glob("*.json")).read_text())
    return found


@pytest.mark.timeout(100)
def test_batch_norm_skipped_on_one_node_ends_the_run(tmp_path: Path) -> None:
    calls = calls_of(PROGRAM.format(drop=True, node=9, decision="pass", afterwards="pass"), tmp_path)
    assert set(calls) == {"node-0", "node-1"}
    assert any(call.startswith(message_topics.statistics("blocks")) for call in calls.values())


@pytest.mark.timeout(100)
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("decision", "afterwards", "expected"),
    [
        ("continue", "pass", message_topics.NEXT_BATCH),
        pytest.param("break", "pass", message_topics.epoch(2), marks=pytest.mark.slow),
        pytest.param("pass", "if epoch and run.rank == {node}: break", message_topics.END, marks=pytest.mark.slow),
    ],
)
def test_decision_made_on_one_node_only_ends_the_run(
    decision: str, afterwards: str, expected: str, node: int, tmp_path: Path
) -> None:
    text = PROGRAM.format(drop=False, node=node, decision=decision, afterwards=afterwards.format(node=node))
    assert expected in calls_of(text, tmp_path).values()
