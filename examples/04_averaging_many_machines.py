"""Many machines on a slow network: let them work alone for a while, then average. One of them dies on the way.

    python examples/04_averaging_many_machines.py

types for you, on this machine, what you would type on four:

    evener up                          a master; it prints its address and a token
    evener join ADDRESS --token T      three nodes, here of speeds 1, 1/2 and 1/4; they measure themselves
    evener train THIS_FILE --agreement sync
    evener train THIS_FILE --agreement average --local-steps 20
    evener train THIS_FILE --agreement diloco --local-steps 20 --compress int8
    evener down                        ends nodes and master

*sync* sends a gradient to the master for every step. *average* lets every node make its own steps, 20 the fastest and
as many fewer the others as they are slower, and then takes the mean of their weights, weighted by the samples that each
has seen. *diloco* takes that mean for the direction of a step with momentum, and here sends it in 8 bits a number. The
bytes fall twentyfold and eightyfold. (On this machine the network costs nothing; on 100 Mbit/s they are the time.)

Amid the run that averages, one node is killed, as a machine dies: the others notice within the patience, take over its
samples and go on. Code travelled to the nodes by itself; nothing but `evener` was installed there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task
from evener.data.digits import load_digits, split_digits

NODES = {"workshop": "1.0", "attic": "0.5", "cellar": "0.25"}
RUNS = (
    ("--agreement", "sync"),
    ("--agreement", "average", "--local-steps", "20"),
    ("--agreement", "diloco", "--local-steps", "20", "--compress", "int8"),
)
JOIN_SECONDS = 60.0


def data(part: int) -> TensorDataset:
    """Training (0) or validation samples (1): 8x8 handwritten digits, which come with Evener."""
    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    return TensorDataset(torch.from_numpy(images[chosen]).float() / 16, torch.from_numpy(labels[chosen]).long())


def task() -> Task:
    """What `evener train` looks for in this file, here and, once the file has travelled, on the nodes."""
    return Task(
        name="many-machines",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: data(0),
        validation_data=lambda: data(1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
        epochs=40,
    )


class Machines:
    """A master and nodes, as commands in processes of their own; `with` ends what is left of them.

    Args:
        folder: for what they leave on the disk.
    """

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._folder, self._ends = folder, ends
        self._at_home = ("--home", str(folder / "home"))
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        master = self._start("up", "--listen", "127.0.0.1:0", "--patience", "3", "--json", *self._at_home)
        assert master.stdout is not None
        self._master = json.loads(master.stdout.readline())

    def join(self, name: str, speed: str) -> None:
        """Start a node."""
        cache = str(self._folder / f"cache-{name}")
        words = ("join", self._master["address"], "--token", self._master["token"], "--cache", cache)
        self.nodes[name] = self._start(*words, "--name", name, "--speed", speed)

    def wait_for_nodes(self) -> None:
        """Return when all nodes have joined and measured themselves."""
        until = time.monotonic() + JOIN_SECONDS
        while sum(node["score"] is not None for node in self.ask()["nodes"]) < len(self.nodes):
            assert time.monotonic() < until, f"the nodes did not join within {JOIN_SECONDS:.0f} s"
            time.sleep(0.2)

    def ask(self) -> Any:
        """What `evener nodes` shows."""
        return json.loads(self.evener("nodes", "--json"))

    def evener(self, *words: str) -> str:
        """What a command of this master's prints."""
        return subprocess.run(self._typed(*words, *self._at_home), check=True, stdout=subprocess.PIPE, text=True).stdout

    def train(self, *words: str, kill: str = "") -> Any:
        """The summary of a run, amid which a node may be killed."""
        output = str(self._folder / words[1])
        training = self._start("train", __file__, *words, "--json", "--output", output, *self._at_home, is_heard=True)
        assert training.stderr is not None
        for line in training.stderr:  # what it tells while it goes on
            if kill and line.startswith("epoch 1 "):
                self.nodes[kill].kill()
        said, _ = training.communicate()
        assert training.returncode == 0
        return json.loads(said.splitlines()[-1])

    def _start(self, *words: str, is_heard: bool = False) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the nodes share this machine's cores
        process = self._ends.enter_context(
            subprocess.Popen(
                self._typed(*words),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_heard else subprocess.DEVNULL,
                text=True,
            )
        )
        self._ends.callback(process.kill)
        return process

    def _typed(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "evener", *words]


def main() -> None:
    """Type all of it, and compare."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        machines = Machines(Path(folder), ends)
        for name, speed in NODES.items():
            machines.join(name, speed)
        machines.wait_for_nodes()
        for words in RUNS:
            summary = machines.train(*words, kill="cellar" if "average" in words else "")
            sent = sum(node["bytes_sent"] for node in summary["nodes"])
            shares = ", ".join(f"{node['name']} {node['share']:.0%}" for node in summary["nodes"])
            print(
                f"{words[1]:8} {summary['seconds']:5.1f} s  {sent / 1e6:7.2f} MB sent  "
                f"accuracy {summary['validation_accuracy']:.1%}  ({shares})"
            )
        machines.evener("down")


if __name__ == "__main__":  # the nodes import this file too
    main()
