"""Programs on accelerators: compared with one process by a run on CPUs, trained like it, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.accelerator import DEVICE, NEEDS_DEVICE, devices
from support.commands import evener

pytestmark = [*NEEDS_DEVICE, pytest.mark.timeout(300)]
OTHER = "standin:1" if DEVICE.startswith("standin") else DEVICE
PROGRAM = """
import sys, evener, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(3)
    run = evener.join()
    rows = TensorDataset(torch.randn(96, 6).double(), torch.randn(96, 1).double())
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    loader = DataLoader(rows, batch_size=12, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            inputs, targets = inputs.to(run.device), targets.to(run.device)
            optimizer.zero_grad()
            loss = LOSS
            loss.backward()
            optimizer.step()
    if run.leader:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, sys.argv[1])
"""
MEAN, SUM = "(model(inputs) - targets).square().mean()", "(model(inputs) - targets).square().sum()"


@pytest.mark.parametrize("on", [("gpu", "other"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_program_is_compared_and_equals_one_process(tmp_path: Path, on: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("LOSS", MEAN))
    where = devices(*on).replace("other", OTHER)
    for file, words in (("alone", ("--devices", "cpu")), ("both", ("--devices", where, "--shares", "2,1"))):
        ran = evener("run", *words, "--run-folder", f"run-{file}", "program.py", file, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr
    plan = read_noun(tmp_path / "run-both" / "record.json", TrainRecord).plan
    assert plan.check is not None
    assert plan.check.precisions == ("fp64",)
    alone, both = (torch.load(tmp_path / name) for name in ("alone", "both"))
    assert max(float((alone[name].double() - both[name].double()).abs().max()) for name in alone) < 1e-9


def test_program_that_would_differ_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("LOSS", SUM))
    words = ("--devices", devices("gpu", "other").replace("other", OTHER), "--shares", "2,1")
    ran = evener("run", *words, "program.py", "weights", cwd=tmp_path, timeout=200)
    assert ran.returncode == 2, ran.stderr
    assert not (tmp_path / "weights").exists()
    assert "would train something else than in one process" in ran.stderr.splitlines()[-1]


def test_program_that_fails_on_processors_is_trained_with_the_reason(tmp_path: Path) -> None:
    code = PROGRAM.replace("LOSS", MEAN).replace("    torch.manual_seed(3)", "    torch.manual_seed(3); refuse()")
    refuse = "def refuse():\n    import os\n    assert 'EVENER_CPU_CHECK' not in os.environ, 'needs a GPU'\n"
    (tmp_path / "program.py").write_text(refuse + code)
    words = ("--devices", devices("gpu", "other").replace("other", OTHER))
    ran = evener("run", *words, "--run-folder", "run", "program.py", "weights", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    (note,) = [
        e.message for e in read_noun(tmp_path / "run" / "record.json", TrainRecord).events if e.kind == "unchecked"
    ]
    assert "needs a GPU" in note


def test_check_on_cpus_writes_no_files_of_the_program(tmp_path: Path) -> None:
    """Its ranks end amid the first steps, where a program might save what it has."""
    code = PROGRAM.replace("LOSS", MEAN).replace("    for epoch", "    open('began', 'a').write('once')\n    for epoch")
    lines = code.splitlines()
    begin = next(number for number, line in enumerate(lines) if "for epoch" in line)
    end = next(number for number, line in enumerate(lines) if "if run.leader" in line)
    loop = [f"    {line}" for line in lines[begin:end]]
    after = ["    finally:", "        if run.leader:", "            open('ended', 'a').write('once')"]
    (tmp_path / "program.py").write_text("\n".join([*lines[:begin], "    try:", *loop, *after, *lines[end:], ""]))
    words = ("--devices", devices("gpu", "other").replace("other", OTHER))
    ran = evener("run", *words, "--run-folder", "run", "program.py", "weights", cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert read_noun(tmp_path / "run" / "record.json", TrainRecord).plan.check is not None
    assert (tmp_path / "began").read_text() == "once" * 2  # of two ranks
    assert (tmp_path / "ended").read_text() == "once"
