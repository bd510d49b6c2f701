"""Weights and norms that come into a model while it trains are trained as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.frontends.programs.entry import finish
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.errors import EvenerError, InvalidInput
from programs.suite import Outcome, off, perform, plain, run_of

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener  # added

run = evener.join()  # added
loader = DataLoader(TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,))), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scale = None
model, optimizer, loader = run.prepare(model, optimizer, loader)  # added
run.equivalence_check.is_wanted = False  # added
for epoch in run.epochs(2):  # was: for epoch in range(2):
    {before}
    for x, y in loader:
        optimizer.zero_grad()
        {amid}
        out = model(x) if scale is None else model(x) * scale
        F.cross_entropy(out, y).backward()
        optimizer.step()
results = {{**model.state_dict(), **({{}} if scale is None else {{"scale": scale}})}}
"""
NEW = {
    "a head": "model[2] = nn.Linear(9, 3); optimizer.add_param_group({'params': list(model[2].parameters())})",
    "a norm": "model[1] = nn.BatchNorm1d(9); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "a norm without weights": "model[1] = nn.BatchNorm1d(9, affine=False)",
    "parametrised": "nn.utils.parametrizations.weight_norm(model[0]); "
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "beside the model": "scale = nn.Parameter(torch.ones(3)); optimizer.add_param_group({'params': [scale]})",
}


def rank_of_program(env: RankEnvironment, work: tuple[str, str]) -> None:
    text, file = work
    run = run_of(env, "2,1")
    outcome = perform(text, "program")
    finish(run, env)
    if env.rank == 0:
        torch.save(tuple(outcome), file)


def trained(text: str, folder: Path) -> Outcome:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    run_local(rank_of_program, nodes, (text, str(folder / "found.pt")), patience=30, on_event=lambda _: None)
    return Outcome(*torch.load(folder / "found.pt"))


@pytest.mark.parametrize(
    "kind", ["a norm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in NEW if kind != "a norm")]
)
def test_layers_added_between_epochs_train_as_in_one_process(kind: str, tmp_path: Path) -> None:
    text = PROGRAM.format(before=f"if epoch == 1: {NEW[kind]}", amid="pass")
    assert off(trained(text, tmp_path), perform(plain(text), "program")) < 1e-10


@pytest.mark.slow
def test_equivalence_check_accepts_a_layer_added_between_epochs(tmp_path: Path) -> None:
    text = PROGRAM.format(before=f"if epoch == 1: {NEW['a head']}", amid="pass")
    text = text.replace("run.equivalence_check.is_wanted = False  # added", "").replace("(2)", "(4)")
    assert off(trained(text, tmp_path), perform(plain(text), "program")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a head", "a norm without weights"])
def test_layer_added_after_loading_a_batch_is_refused(kind: str, tmp_path: Path) -> None:
    text = PROGRAM.format(before="pass", amid=f"if epoch: {NEW[kind]}")
    with pytest.raises(EvenerError) as raised:
        trained(text, tmp_path)
    assert raised.value.exit_code == InvalidInput.exit_code
