"""Seeded schedules of faults: a run completes exactly, or ends with a true sentence, and leaves nothing behind.

A schedule has two to eight faults, the first of which may strike before step 1. EVENER_SCHEDULES=100 tries as many
seeds on local nodes, EVENER_SCHEDULES_ON_A_MASTER=40 on the ranks of a master.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from hosts import Host, Hosts, Process, fixture
from hosts.fixture import Build
from support.commands import command, processes_of

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE, LONGEST, NODES = 3.0, 150.0, 3
SAMPLES, EPOCHS = 400, 8
LOST = 4
"""Exit code of a run whose nodes were lost."""
TASK = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def data(samples, seed):
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, 8, generator=draw) + targets[:, None], targets)

def loss(outputs, targets):
    time.sleep({pause})
    return nn.functional.cross_entropy(outputs, targets)

task = Task(
    name="schedule",
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    loss=loss,
    train_data=lambda: data({samples}, 1),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    batch_size=20,
    epochs={epochs},
)
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one process, host or master.

    Attributes:
        at: seconds after the first rank was seen.
        kind: what is done.
        victim: number of the node, of those that are there.
        seconds: until it is undone, where it can be.
    """

    at: float
    kind: str
    victim: int
    seconds: float


def schedule(seed: int, kinds: Sequence[str], span: float) -> list[Fault]:
    """Two to eight faults within `span` seconds, one of them at once in every other schedule."""
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, span) for _ in range(draw.randint(2, 8)))
    if draw.random() < 0.5:
        times[0] = 0.0
    return [
        Fault(at=at, kind=draw.choice(kinds), victim=draw.randrange(NODES), seconds=PATIENCE * draw.uniform(0.3, 2.5))
        for at in times
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    task = write_task(folder, pause=0.0)
    perform(RunConfig(task=str(task), seed=3, precision="fp64", devices="cpu", output=folder / "run", check=False))
    return load_file(folder / "run" / "model.safetensors")


def write_task(folder: Path, pause: float = 0.02) -> Path:
    path = folder / "schedule_task.py"
    path.write_text(TASK.format(pause=pause, samples=SAMPLES, epochs=EPOCHS))
    return path


class Undoing:
    """What is to be undone, and when."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callable[[], object]]] = []

    def after(self, seconds: float, undo: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, undo))

    def look(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        ripe = [undo for when, undo in self._due if everything or when <= now]
        self._due = [] if everything else [one for one in self._due if one[0] > now]
        for undo in ripe:
            undo()


def strike_while(
    is_running: Callable[[], bool],
    has_ranks: Callable[[], object],
    faults: Sequence[Fault],
    strike: Callable[[Fault, Undoing], None],
) -> None:
    """Strike at the times of the schedule, from the moment that there are ranks, while the run goes on."""
    undoing, left = Undoing(), list(faults)
    end = time.monotonic() + LONGEST
    began: float | None = None
    while is_running():
        assert time.monotonic() < end, "the run neither completes nor ends"
        if began is None and has_ranks():
            began = time.monotonic()
        while left and began is not None and time.monotonic() - began >= left[0].at:
            strike(left.pop(0), undoing)
        undoing.look()
        time.sleep(0.02)
    undoing.look(everything=True)


def send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def ranks_of(marker: str) -> list[psutil.Process]:
    """The processes of a run that are ranks, in the order in which they were started."""
    found = []
    for pid in processes_of(marker):
        try:
            process = psutil.Process(pid)
            parent = process.parent()
            if parent is not None and "forkserver" in " ".join(parent.cmdline()) and process.status() != "zombie":
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def hold(folder: Path, code: int, said: str, alone: dict[str, torch.Tensor], faults: Sequence[Fault]) -> None:
    """The run completed exactly; or it says who was lost, and everybody had been struck."""
    assert "Traceback" not in said, said[-3000:]
    if code != 0:
        assert code == LOST, (code, faults, said[-3000:])
        assert len(faults) >= NODES, f"ended though some node was never struck: {faults}\n{said[-3000:]}"
        return
    weights = load_file(folder / "model.safetensors")
    assert max(float((weights[name].double() - one.double()).abs().max()) for name, one in alone.items()) < 1e-10
    record = read_noun(folder / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == SAMPLES * EPOCHS
    assert [path.name for path in folder.rglob(".*")] == []


def nothing_is_left(marker: str, shared_before: set[str]) -> None:
    end = time.monotonic() + 15
    while (left := processes_of(marker)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
    assert set(os.listdir("/dev/shm")) - shared_before == set()


@contextmanager
def marked() -> Iterator[str]:
    """A variable of the environment by which the processes of a run are known; none of them is left afterwards."""
    marker, shared = f"EVENER_TEST={uuid.uuid4()}", set(os.listdir("/dev/shm"))
    try:
        yield marker
        nothing_is_left(marker, shared)
    finally:
        for pid in processes_of(marker):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(int(os.environ.get("EVENER_SCHEDULES", "3"))))
def test_local_nodes_under_a_schedule_of_faults(seed: int, tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    faults = schedule(seed, ["kill", "kill", "freeze", "freeze", "terminate"], span=8.0)
    words = ["train", str(write_task(tmp_path)), "--local-nodes", ",".join("1" * NODES), "--precision", "fp64"]
    words += ["--seed", "3", "--patience", str(PATIENCE), "--output", "run", "--shares", "3,2,1"]

    with marked() as marker:
        with (tmp_path / "said").open("w") as said:
            environment = {**os.environ, **dict([marker.split("=")]), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
            run = subprocess.Popen(command(*words), cwd=tmp_path, stdout=said, stderr=said, env=environment)

        def strike(fault: Fault, undoing: Undoing) -> None:
            ranks = ranks_of(marker)
            if not ranks:
                return
            victim = ranks[fault.victim % len(ranks)]
            if fault.kind == "freeze":
                send(victim, signal.SIGSTOP)
                undoing.after(fault.seconds, lambda: send(victim, signal.SIGCONT))
            else:
                send(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)

        strike_while(lambda: run.poll() is None, lambda: len(ranks_of(marker)) >= NODES, faults, strike)
    assert run.returncode is not None
    hold(tmp_path / "run", run.returncode, (tmp_path / "said").read_text(), alone, faults)


class MasterAndNodes:
    """A master and its nodes, each on a host of its own, which are killed, frozen, cut off and started again."""

    def __init__(self, hosts: Hosts, folder: Path, marker: str) -> None:
        self._hosts, self._folder, self._environment = hosts, folder, dict([marker.split("=")])
        self._home = folder / "home"
        self._token = ""
        self.up()
        for number in range(NODES):
            self.join(number)

    def up(self) -> None:
        words = ["up", "--home", str(self._home), "--listen", ":7117", "--json", "--patience", str(PATIENCE)]
        self._master = self._start("master", *words)
        self._token = json.loads(self._master.wait_for(r"\{.*\}", 60)[0])["token"]

    def join(self, number: int) -> None:
        name = f"node-{number}"
        words = ["join", f"{self._hosts['master'].address}:7117", "--name", name, "--device", "cpu"]
        self._start(name, *words, "--cache", str(self._folder / f"cache-{name}"))

    def train(self, task: Path) -> Process:
        words = ["train", str(task), "--home", str(self._home), "--output", str(self._folder / "run")]
        words += ["--precision", "fp64", "--seed", "3", "--patience", str(PATIENCE)]
        return self._start("master", *words)

    def strike(self, fault: Fault, undoing: Undoing) -> None:
        machine, number = self._hosts[f"node-{fault.victim}"], fault.victim
        if fault.kind == "master killed":
            if self._master.is_running:  # else it is down already, and comes back
                self._master.kill()
                undoing.after(min(fault.seconds, 4.0), self.up)
        elif fault.kind == "node killed":
            machine.processes[-1].kill()
            undoing.after(fault.seconds, lambda: self.join(number))
        elif fault.kind == "node frozen":
            frozen = machine.processes[-1]
            frozen.stop()
            undoing.after(fault.seconds, frozen.cont)
        else:
            machine.cut() if fault.kind == "cut" else machine.mute()
            undoing.after(fault.seconds, machine.join)

    def _start(self, host: str, *words: str) -> Process:
        environment = {**self._environment, "EVENER_TOKEN": self._token, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        return self._hosts[host].start([sys.executable, "-m", "evener", *words], environment=environment)


@pytest.mark.parametrize("seed", range(int(os.environ.get("EVENER_SCHEDULES_ON_A_MASTER", "2"))))
def test_ranks_of_a_master_under_a_schedule_of_faults(
    seed: int, tmp_path: Path, alone: dict[str, torch.Tensor], build_hosts: Build
) -> None:
    kinds = ["node killed", "node killed", "node frozen", "cut", "one-way cut", "master killed"]
    faults = schedule(1000 + seed, kinds, span=12.0)
    nodes = [Host(name=f"node-{number}") for number in range(NODES)]
    with marked() as marker, build_hosts(Host(name="master"), *nodes) as hosts:
        cluster = MasterAndNodes(hosts, tmp_path, marker)
        run = cluster.train(write_task(tmp_path))
        strike_while(lambda: run.is_running, lambda: len(ranks_of(marker)) >= 1, faults, cluster.strike)
        code, said = run.wait(1), run.text
        hosts["master"].start(
            [sys.executable, "-m", "evener", "down", "--home", str(tmp_path / "home")],
            environment=dict([marker.split("=")]),
        ).wait(60)
    hold(tmp_path / "run", code, said, alone, faults)
