"""`evener run` with real programs, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.frontends.programs.options import ScriptConfig
from evener.records.errors import InvalidInput, InvalidValue
from support.commands import evener, evener_here
from support.refusals import refused
from support.sockets import free_port

PROGRAM = """
import sys
import evener
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(40, 4).double(), torch.randn(40, 1).double())
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        shown = run.mean(loss)
{more}
if run.leader:
    torch.save(run.state(model), "weights.pt")
sys.stdout.write(f"{{sys.argv[1:]}} {{shown:.12f}}\\n")  # at once, as both ranks of torchrun write
"""


def write(folder: Path, more: str = "") -> Path:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(more=more))
    return path


@pytest.mark.slow
def test_program_with_its_own_collectives_is_still_compared(tmp_path: Path) -> None:
    own = """
        if run.size > 1 and torch.distributed.is_initialized():  # as Lightning asks in every batch
            torch.distributed.broadcast(torch.zeros(1), src=0)
"""
    path = write(tmp_path)
    path.write_text(
        path.read_text().replace("        optimizer.zero_grad()\n", own + "        optimizer.zero_grad()\n")
    )
    evener("run", "program.py", "--local-nodes", "1,0.5", "--run-folder", "out", cwd=tmp_path)
    check = json.loads((tmp_path / "out" / "record.json").read_text())["plan"]["check"]
    assert check["off"] < 1e-9


AT_EXIT = """
import atexit, multiprocessing
from pathlib import Path
lock = multiprocessing.Lock()  # as progress bars have one
atexit.register(lambda: Path(f"ended-{run.rank}").touch())
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["evener", "torchrun"])
def test_exit_handlers_run_on_every_node(tmp_path: Path, launcher: str) -> None:
    write(tmp_path, AT_EXIT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py")
    here = ("-m", "evener", "run", "program.py", "--local-nodes", "1,1")
    typed = [sys.executable, *(here if launcher == "evener" else torchrun)]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert {path.name for path in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}
    assert "leaked" not in done.stderr


@pytest.mark.slow
def test_program_trains_equally_alone_on_nodes_and_under_torchrun(tmp_path: Path) -> None:
    write(tmp_path)
    alone = subprocess.run(
        [sys.executable, "program.py", "--lr", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    words = ("program.py", "--local-nodes", "1,0.5", "--run-folder", "out", "--lr", "3", "--json")
    nodes = evener("run", *words, cwd=tmp_path, timeout=100)
    assert nodes.returncode == 0, nodes.stderr
    first, last = nodes.stdout.strip().splitlines()
    assert first == alone.stdout.strip()  # the leader's words alone, and the program's own options
    assert json.loads(last)["samples_per_second"] > 0
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [step["samples"] for step in record["steps"]] == [8] * 10
    assert record["plan"]["check"]["off"] < 1e-9
    assert record["steps"][-1]["loss"] == pytest.approx(float(first.split()[-1]), rel=1e-9)
    assert [node["name"] for node in record["nodes"]] == ["node-0", "node-1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py", "--lr", "3"]
    ranks = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ranks.returncode == 0, ranks.stderr
    assert set(ranks.stdout.strip().splitlines()) == {first}


WITH_WORKERS = """
import evener
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

run = evener.join()
torch.manual_seed(0)

class Doubled(Dataset):
    def __init__(self, change):
        self.rows, self.change = torch.randn(40, 4).double(), change

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.change(self.rows[i])

model = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Doubled(lambda row: 2 * row), batch_size=8, shuffle=True, num_workers=1)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x in loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
if run.leader:
    torch.save(run.state(model), "weights.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("nodes", ["1,0.5", "1"])
def test_script_without_main_guard_loads_lambdas_in_workers(nodes: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITH_WORKERS)
    alone = [sys.executable, "program.py"]
    subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    expected = torch.load(tmp_path / "weights.pt")
    (tmp_path / "weights.pt").unlink()
    done = evener("run", "program.py", "--local-nodes", nodes, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "weights.pt")
    assert all(float((found[name] - value).abs().max()) < 1e-12 for name, value in expected.items())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("raise ValueError('a mistake')", "ValueError: a mistake (in <module>, program.py, line 22)"),
        pytest.param("sys.exit(3)", "program.py ended itself: exit code 3", marks=pytest.mark.slow),
        pytest.param("run.mean(loss)", "take it inside the loop over the loader", marks=pytest.mark.slow),
        pytest.param(
            "run.prepare(3)", "run.prepare takes models, optimisers and loaders, got int", marks=pytest.mark.slow
        ),
    ],
)
def test_program_error_is_reported_in_one_sentence(tmp_path: Path, more: str, sentence: str) -> None:
    write(tmp_path, more)
    result = evener_here("run", "program.py", "--local-nodes", "1,1", cwd=tmp_path)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert sentence in result.stderr.strip().splitlines()[-1]


def test_program_without_join_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('I am alone')\n")
    result = evener_here("run", "program.py", "--local-nodes", "1,1", cwd=tmp_path)
    assert result.returncode == 2
    assert "let it call evener.join()" in result.stderr


def test_task_file_is_refused_with_the_train_command(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("from evener import Task\n\ntask = Task(name='t')\n")
    result = evener_here("run", "my_task.py", cwd=tmp_path)
    assert result.returncode == InvalidInput.exit_code
    assert "evener train my_task.py" in result.stderr


@pytest.mark.parametrize("strategy", ["pipeline", "data+sharded", "data+pipeline"])
def test_unsupported_loop_strategies_are_refused_with_alternatives(strategy: str, tmp_path: Path) -> None:
    write(tmp_path)
    result = evener_here("run", "program.py", "--local-nodes", "1,1", "--strategy", strategy, cwd=tmp_path)
    assert result.returncode == 2
    (sentence,) = result.stderr.strip().splitlines()
    assert f"--strategy {strategy} does not go with a program that calls loss.backward() itself" in sentence
    assert f"`evener train FILE --strategy {strategy}`" in sentence


@pytest.mark.parametrize("strategy", ["auto", "data", "filter", "channel", "hybrid", "sharded", "spatial"])
def test_config_accepts_strategies_that_divide_batches_or_layers(strategy: str) -> None:
    config = ScriptConfig(script=Path("x"), strategy=strategy, shares="3,1", local_nodes="1,1")
    layers = config.layers(2)
    assert (layers.division if layers else None) == (None if strategy in ("auto", "data") else strategy)
    assert layers is None or layers.replicas[0].shares == (3.0, 1.0)
    assert config.layers(1) is None
    with refused(InvalidValue):
        ScriptConfig(script=Path("x"), strategy="date")


def test_missing_program_is_reported(tmp_path: Path) -> None:
    result = evener_here("run", "nothing.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "nothing.py is not there" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [("program.py",), ("-m", "evener", "run", "program.py")], ids=["alone", "evener run"])
@pytest.mark.parametrize(("who", "other"), [("0", "pass"), ("1", "pass"), ("1", "time.sleep(60)")])
def test_failed_program_under_torchrun_leaves_a_record(
    tmp_path: Path, who: str, other: str, words: tuple[str, ...]
) -> None:
    path = write(tmp_path)
    fault = (
        f"        if epoch == 1 and run.rank == {who}:\n"
        "            raise ValueError('a mistake')\n"
        f"        if epoch == 1:\n            {other}\n"
    )
    text = path.read_text().replace("import sys\n", "import sys\nimport time\n", 1)
    path.write_text(text.replace("        optimizer.zero_grad()\n", fault + "        optimizer.zero_grad()\n"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    ended = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    (file,) = (tmp_path / "runs").glob("*/record.json")
    record = json.loads(file.read_text())
    assert 0 < len(record["steps"]) <= 5
    assert record["ending"]
    assert "a mistake" in record["ending"] or who == "1"
    assert record["task"] == "program"


NOT_EXACT = """
from evener.records.errors import NotExact
def fail(*_, **__):
    raise NotExact("after step 9 a weight differs")
type(run).finish = fail
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        ("sys.exit(7)", 3, "evener: program.py ended itself: exit code 7"),
        ("raise SystemExit(7)", 7, ""),
        ("sys.exit(0)", 0, ""),
        ("raise ValueError('a mistake')", 3, "ValueError: a mistake"),
        (NOT_EXACT, 2, "evener: after step 9 a weight differs"),
    ],
    ids=["exit", "SystemExit", "exit 0", "error", "not exact"],
)
def test_end_of_a_program_under_torchrun_has_its_exit_code(tmp_path: Path, end: str, code: int, sentence: str) -> None:
    write(tmp_path, end)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"]
    ended = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode != 0) == (code != 0)
    assert code == 0 or f"(exitcode: {code})" in ended.stderr or f"exitcode  : {code} " in ended.stderr
    assert sentence in ended.stderr
    assert "Exception ignored" not in ended.stderr
    (file,) = (tmp_path / "runs").glob("*/record.json")
    assert bool(json.loads(file.read_text()).get("ending")) == bool(sentence)


THREAD = """
import threading, time
def touch():
    time.sleep(1)
    open(f"thread{run.rank}", "w").close()
threading.Thread(target=touch).start()
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", ["torchrun", "evener run", "evener run under torchrun"])
def test_threads_of_a_program_end_before_it(tmp_path: Path, launcher: str) -> None:
    write(tmp_path, THREAD)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    words = {
        "torchrun": (*torchrun, "program.py"),
        "evener run": ("-m", "evener", "run", "program.py", "--local-nodes", "1,1"),
        "evener run under torchrun": (*torchrun, "-m", "evener", "run", "program.py"),
    }
    typed = [sys.executable, *words[launcher]]
    ended = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {file.name for file in tmp_path.glob("thread*")} == {"thread0", "thread1"}


@pytest.mark.parametrize("words", [("program.py",), ("-m", "evener", "run", "program.py")], ids=["alone", "evener run"])
def test_program_of_a_launcher_shows_its_start_before_it_prepares_a_model(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text("import evener\nrun = evener.join()\n")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, **rank, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "starting: the nodes" in ended.stderr.splitlines()
