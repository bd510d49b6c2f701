"""Programs on accelerators: compared with one process by a run on CPUs, trained like it, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


RESUMED = """
import sys, evener, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    file, order, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.manual_seed(3)
    run = evener.join()
    rows = TensorDataset(torch.randn(48, 6).double(), torch.randn(48, 1).double())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    weights = [*model.parameters(), scale] if order == "outside" else model.parameters()
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(weights, lr=0.05, **momentum)
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scale.data = saved["scale"]
    if order == "before":
        optimizer = run.prepare(optimizer)
        model = run.prepare(model)
    else:
        model, optimizer = run.prepare(model, optimizer)
    loader = run.prepare(DataLoader(rows, batch_size=12, shuffle=True))
    for inputs, targets in loader:
        inputs, targets = inputs.to(run.device), targets.to(run.device)
        optimizer.zero_grad()
        outputs = model(inputs) * scale if order == "outside" else model(inputs)
        (outputs - targets).square().mean().backward()
        optimizer.step()
    if name == "Adam":
        assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())
    if run.leader:
        saved = {"model": run.state(model), "optimizer": optimizer.state_dict(), "scale": scale.detach()}
        torch.save(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, saved), file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "name", "order", "words"),
    [
        (("gpu",), "SGD", "after", ()),
        (("gpu", "other"), "SGD", "after", ("--strategy", "filter")),
        (("gpu", "other"), "Adam", "before", ()),
        (("gpu", "other"), "Adam", "outside", ()),
    ],
)
def test_optimizer_state_that_was_loaded_first_follows_the_weights(
    tmp_path: Path, on: tuple[str, ...], name: str, order: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text(RESUMED)
    where = devices(*on).replace("other", OTHER)
    for file, typed in (("alone", ("--devices", "cpu")), ("there", ("--devices", where, *words))):
        for _ in range(2):
            ran = evener("run", *typed, "program.py", file, order, name, cwd=tmp_path, timeout=200)
            assert ran.returncode == 0, ran.stderr
    alone, there = (torch.load(tmp_path / file)["model"] for file in ("alone", "there"))
    assert max(float((alone[key] - there[key]).abs().max()) for key in alone) < 1e-9


BATCHES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import BatchTask

def data():
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1].sin() + x[:, 1:2])

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().MERGED()

def task():
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return BatchTask(name="batches", model=model, loss=loss, train_data=data, batch_size=12, epochs=2)

if __name__ == "__main__":
    import sys, evener
    evener.train(task(), devices=sys.argv[1], shares=[2, 1], output="python", precision="fp64")
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", [("gpu", "other"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_batch_task_is_compared_and_equals_one_process(tmp_path: Path, on: tuple[str, ...]) -> None:
    (tmp_path / "batches.py").write_text(BATCHES.replace("MERGED", "mean"))
    where = devices(*on).replace("other", OTHER)
    for folder, words in (("alone", ("--devices", "cpu")), ("both", ("--devices", where, "--shares", "2,1"))):
        ran = evener(
            "train", "batches.py", *words, "--precision", "fp64", "--output", folder, cwd=tmp_path, timeout=200
        )
        assert ran.returncode == 0, ran.stderr
    check = read_noun(tmp_path / "both" / "record.json", TrainRecord).plan.check
    assert check is not None
    alone, both = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both"))
    assert max(float((alone[name] - both[name]).abs().max()) for name in alone) < 1e-9


@pytest.mark.slow
def test_batch_task_that_would_differ_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.py").write_text(BATCHES.replace("MERGED", "sum"))
    words = ("--devices", devices("gpu", "other").replace("other", OTHER), "--shares", "2,1", "--output", "run")
    ran = evener("train", "batches.py", *words, cwd=tmp_path, timeout=200)
    assert ran.returncode == 2, ran.stderr
    assert "would train something else than in one process" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
def test_batch_task_from_python_is_compared(tmp_path: Path) -> None:
    (tmp_path / "batches.py").write_text(BATCHES.replace("MERGED", "mean"))
    where = devices("gpu", "other").replace("other", OTHER)
    ran = subprocess.run(
        [sys.executable, "batches.py", where], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    record = read_noun(tmp_path / "python" / "record.json", TrainRecord)
    assert record.plan.check is not None, record.events


HANG = """
            steps = globals().get("steps", 0) + 1
            if steps == 6 and str(run.device) == "standin:0":
                from support import standin
                standin.load().hang(0, True)
"""
LAUNCHERS = {
    "evener run": ("evener", "run", "--devices", "standin:0,standin:1", "--shares", "2,1", "--patience", "3"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


@pytest.mark.slow
@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can hang")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_program_ends_by_the_device_that_hangs(tmp_path: Path, launcher: str) -> None:
    code = PROGRAM.replace("LOSS", MEAN).replace("run.epochs(2)", "run.epochs(9)")
    (tmp_path / "program.py").write_text(
        code.replace("            loss.backward()\n", "            loss.backward()" + HANG)
    )
    words = [sys.executable, "-m", *LAUNCHERS[launcher], "program.py", "weights"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode != 0, ran.stderr
    assert "lost its device standin:0" in ran.stderr
    assert "it has finished nothing for" in ran.stderr
