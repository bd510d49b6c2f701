"""Two computers as a new user sees them: seconds from typing a line to the first step, and how far weights are off.

    python benchmarks/two_pcs.py [--cores 0.6,0.3] [--mbit 1000] [--json]

The computers are network namespaces with CPU quotas (needs root and iproute2). Each way trains in float64 and is
compared with one computer: a script under torchrun, a task on a master's nodes, and the same with `--agreement sync`.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from results import Results, open_results, parser_of
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from hosts import Host, why_not
from hosts.machines import Hosts
from hosts.process import Process

State = dict[str, torch.Tensor]
NAMES = ("pc1", "pc2")
FIRST_STEP = r"step +\d+ +epoch"
SECONDS = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
NETWORK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make_data(samples, seed):
    x = torch.randn(samples, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())

def make_model():
    return nn.Sequential(nn.Linear(20, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 2))

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
TASK = f"""{NETWORK}
from evener import Task

task = Task(
    name="two-pcs", model=make_model, loss=nn.functional.cross_entropy, train_data=lambda: make_data(6400, 1),
    optimizer=make_optimizer, batch_size=1600, epochs=3,
)
"""
PROGRAM = f"""{NETWORK}
import evener

run = evener.join()
torch.manual_seed(0)
model = make_model().double()
optimizer = make_optimizer(model.parameters())
loader = DataLoader(make_data(6400, 1), batch_size=1600, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.mean(loss)
if run.leader:
    torch.save(run.state(model), "weights.pt")
"""


def main() -> None:
    """Train in every way."""
    parser = parser_of(__doc__)
    parser.add_argument("--cores", default="0.6,0.3", help="of the two computers")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each line")
    words = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with open_results(words) as results, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_task.py").write_text(TASK)
        (folder / "train.py").write_text(PROGRAM)
        with Hosts.build(hosts_of(words), folder) as hosts:
            by_torchrun(hosts, folder, results)
            by_a_master(hosts, folder, results)


def hosts_of(words: argparse.Namespace) -> list[Host]:
    """Return the two computers."""
    cores = map(float, words.cores.split(","))
    return [Host(name=name, cores=one, mbit=words.mbit) for name, one in zip(NAMES, cores, strict=True)]


def by_torchrun(hosts: Hosts, folder: Path, results: Results) -> None:
    """Train the script on one computer, then on both."""
    weights, begin = folder / "weights.pt", ["torchrun", "--nnodes", "2", "--nproc-per-node", "1"]
    finish(hosts["pc1"].start(["python", "train.py"], cwd=folder, environment=ENVIRONMENT))
    alone = torch.load(weights)
    environment = {**ENVIRONMENT, "EVENER_SECRET": secrets.token_hex(16)}

    def start(rank: int) -> Process:
        place = ["--node-rank", str(rank), "--master-addr", hosts["pc1"].address, "--master-port", "29500"]
        return hosts[NAMES[rank]].start([*begin, *place, "train.py"], cwd=folder, environment=environment)

    measure("torchrun, a script", lambda: [start(0), start(1)], lambda: torch.load(weights), alone, results)


def by_a_master(hosts: Hosts, folder: Path, results: Results) -> None:
    """Train the task on one computer, then on the nodes of a master on the first one."""
    pc1, home = hosts["pc1"], str(folder / "home")

    def start(*command: str, host: str = "pc1") -> Process:
        return hosts[host].start(["evener", *command], cwd=folder, environment=ENVIRONMENT)

    finish(start("train", "my_task.py", "--precision", "fp64", "--output", "alone"))
    alone = load_file(folder / "alone" / "model.safetensors")
    up = start("up", "--listen", f"{pc1.address}:7117", "--home", home, "--json")
    said = json.loads(up.wait_for(r"\{.*\}", SECONDS)[0])
    for name in NAMES:
        start("join", said["address"], "--token", said["token"], "--cache", str(folder / name), host=name)
    deadline = time.monotonic() + SECONDS
    while sum(node["score"] is not None for node in nodes_of(start("nodes", "--json", "--home", home))) < len(NAMES):
        assert time.monotonic() < deadline, "the nodes did not join"
    for title, words in (("a master's nodes, ranks", ()), ("a master's nodes, sync", ("--agreement", "sync"))):
        output = title.rpartition(" ")[2]
        line = ("train", "my_task.py", "--home", home, "--precision", "fp64", "--output", output, *words)
        path = folder / output / "model.safetensors"
        measure(title, partial(start_one, start, line), partial(load_file, path), alone, results)
    finish(start("down", "--home", home))


def start_one(start: Callable[..., Process], line: Sequence[str]) -> list[Process]:
    """Start one command."""
    return [start(*line)]


def nodes_of(asked: Process) -> list[dict[str, object]]:
    """Return what `evener nodes --json` says."""
    finish(asked)
    nodes: list[dict[str, object]] = json.loads(asked.text)["nodes"]
    return nodes


def measure(
    way: str, start: Callable[[], Sequence[Process]], weights: Callable[[], State], alone: State, results: Results
) -> None:
    """Start the commands of one way; add the seconds to the first step, and the largest difference of a weight."""
    typed = time.monotonic()
    first, *others = start()
    first.wait_for(FIRST_STEP, SECONDS)
    seconds = time.monotonic() - typed
    finish(first, *others)
    found = weights()
    off = max(float((found[name] - value).abs().max()) for name, value in alone.items())
    is_shared = "not used" not in first.text
    form = "{way:24} first step after {seconds:5.1f} s   weights off by {off:.1e}   both used: {is_shared}"
    results.add(form, way=way, seconds=seconds, off=off, is_shared=is_shared)


def finish(*commands: Process) -> None:
    """Wait for commands, which have to succeed."""
    for command in commands:
        assert command.wait(SECONDS) == 0, command.text


if __name__ == "__main__":
    main()
