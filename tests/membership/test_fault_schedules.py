"""Seeded schedules of faults: a run completes exactly, or ends with a true sentence, and leaves nothing behind.

A schedule has two to eight faults, the first of which may strike before step 1. EVENER_SCHEDULES=100 tries as many
seeds on local nodes, EVENER_SCHEDULES_ON_A_MASTER=40 on the ranks of a master; 20-29 tries those seeds alone, and 3,7
those two. What each seed came to is a line of JSON in the file that EVENER_SCHEDULE_RESULTS names, if it is set.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from support.fault_schedules import (
    HOLDERS,
    LOST,
    NODES,
    PATIENCE,
    Fault,
    Strikes,
    drafts,
    ranks_of,
    record,
    resumed_step,
    schedule,
    send,
    strike_while,
)

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SAMPLES, EPOCHS, BATCH = 400, 5, 20
TASK = """
import os, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def data(samples, seed):
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, 8, generator=draw) + targets[:, None], targets)

def loss(outputs, targets):
    if "{holders}" in os.environ and outputs.requires_grad:
        (Path(os.environ["{holders}"]) / str(os.getpid())).touch()
    time.sleep({pause})
    return nn.functional.cross_entropy(outputs, targets)

task = Task(
    name="schedule",
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    loss=loss,
    train_data=lambda: data({samples}, 1),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    batch_size={batch},
    epochs={epochs},
)
"""


def seeds(variable: str, default: str) -> list[int]:
    """Those that a variable of the environment names: a number of them, a range, or a list."""
    words = os.environ.get(variable, default)
    if "-" in words:
        first, last = map(int, words.split("-"))
        return list(range(first, last + 1))
    return list(map(int, words.split(","))) if "," in words else list(range(int(words)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    task = write_task(folder, pause=0.0)
    perform(RunConfig(task=str(task), seed=3, precision="fp64", devices="cpu", output=folder / "run", check=False))
    return load_file(folder / "run" / "model.safetensors")


def write_task(folder: Path, pause: float = 0.01) -> Path:
    path = folder / "schedule_task.py"
    path.write_text(TASK.format(pause=pause, samples=SAMPLES, epochs=EPOCHS, batch=BATCH, holders=HOLDERS))
    return path


class Trial:
    """One seed: its folder, the variables of its processes, and what was done to them.

    Attributes:
        folder: of the run and all that it needs.
        marker: variable by which its processes are known.
        environment: that it is started with; $TMPDIR is a folder of its own.
        shown: file with what the run shows.
        strikes: see `Strikes`.
        left: what was left behind.
    """

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self._temporary = folder, temporary
        self.marker = f"EVENER_TEST={uuid.uuid4()}"
        holders = folder / "holders"
        holders.mkdir()
        self.environment = {
            **dict([self.marker.split("=")]),
            HOLDERS: str(holders),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "500",  # one line per event
        }
        self.shown = folder / "said"
        self.strikes = Strikes(self.marker, holders, lambda: self.shown.read_text() if self.shown.exists() else "")
        self.left: dict[str, list[Any]] = {}
        self._shared = set(os.listdir("/dev/shm"))

    def _new_shared(self) -> list[str]:
        return sorted(set(os.listdir("/dev/shm")) - self._shared)

    def see_left(self) -> None:
        """Note what is left: processes, shared memory, files for a while, and drafts of checkpoints."""
        end = time.monotonic() + 15
        while (processes := processes_of(self.marker)) and time.monotonic() < end:
            time.sleep(0.1)
        while (shared := self._new_shared()) and time.monotonic() < end:  # which a run beside may have
            time.sleep(0.1)
        self.left |= {
            "processes": processes,
            "shared": shared,
            "temporary": sorted(os.listdir(self._temporary)),
            "drafts": drafts(self.folder),
        }

    def judged(self, code: int | None, said: str, alone: dict[str, torch.Tensor], end: float) -> dict[str, Any]:
        """The verdict, and why it is one: a run completed exactly, or ended as nobody was left."""
        sentence = next((line for line in reversed(said.splitlines()) if line.startswith("evener: ")), "")
        found: dict[str, Any] = {"code": code, "sentence": sentence, "left": self.left}
        behind = {kind: names for kind, names in self.left.items() if names}
        wrong = [f"left behind: {behind}"] if behind else []
        if "Traceback" in said:
            wrong.append("a traceback")
        if code == 0:
            wrong += self._inexact(alone, said)
        elif code != LOST or not sentence:
            wrong.append(f"exit code {code}")
        elif healthy := self.strikes.healthy_holders(end):
            wrong.append(f"ended though {healthy} held the state and had met no fault")
        verdict = "failed" if wrong else ("exact" if code == 0 else "justified")
        return {**found, "verdict": verdict, "why": "; ".join(wrong)}

    def _inexact(self, alone: dict[str, torch.Tensor], said: str) -> list[str]:
        """In what the result differs from that of one process; the record begins where the last beginning did."""
        folder = self.folder / "run"
        weights = load_file(folder / "model.safetensors")
        off = max(float((weights[name].double() - one.double()).abs().max()) for name, one in alone.items())
        trained = sum(step.samples for step in read_noun(folder / "record.json", TrainRecord).steps)
        wrong = [] if off < 1e-10 else [f"weights are off by {off}"]
        expected = SAMPLES * EPOCHS - BATCH * resumed_step(said)
        return wrong + ([] if trained == expected else [f"{trained} samples were trained instead of {expected}"])


@contextmanager
def trial(folder: Path) -> Iterator[Trial]:
    """A seed whose processes have ended afterwards."""
    temporary = Path(tempfile.mkdtemp(prefix="schedule-"))
    one = Trial(folder, temporary)
    try:
        yield one
    finally:
        for pid in processes_of(one.marker):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temporary)


def require(line: dict[str, Any], said: str) -> None:
    """Fail if the product did."""
    assert line["verdict"] != "failed", f"{line}\n{said[-3000:]}"


@pytest.mark.parametrize("seed", seeds("EVENER_SCHEDULES", "3"))
def test_local_run_ends_correctly_under_a_fault_schedule(
    seed: int, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    faults = schedule(seed, ["kill", "kill", "freeze", "freeze", "terminate"], span=8.0)
    words = ["train", str(write_task(tmp_path)), "--local-nodes", ",".join("1" * NODES), "--precision", "fp64"]
    words += ["--seed", "3", "--patience", str(PATIENCE), "--output", "run", "--shares", "3,2,1"]

    def strike(fault: Fault, strikes: Strikes) -> None:
        if not (ranks := strikes.see()):
            return
        victim = ranks[fault.victim % len(ranks)]
        strikes.struck(fault, [victim.pid])
        if fault.kind == "freeze":
            send(victim, signal.SIGSTOP)
            strikes.after(fault.seconds, lambda: send(victim, signal.SIGCONT))
        else:
            send(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)

    with trial(tmp_path) as one:
        with one.shown.open("w") as said:
            environment = {**os.environ, **one.environment}
            run = subprocess.Popen(command(*words), cwd=tmp_path, stdout=said, stderr=said, env=environment)
        end = strike_while(lambda: run.poll() is None, NODES, faults, strike, one.strikes)
        one.see_left()
        text = one.shown.read_text()
        line = record("local", seed, one.strikes, end, one.judged(run.returncode, text, alone, end))
    require(line, text)


class MasterAndNodes:
    """A master and its nodes, each on a host of its own, which are killed, frozen, cut off and started again."""

    def __init__(self, hosts: Hosts, one: Trial) -> None:
        self._hosts, self._trial, self._folder = hosts, one, one.folder
        self._home = one.folder / "home"
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

    def down(self) -> None:
        """End the master, and then the nodes."""
        self._start("master", "down", "--home", str(self._home)).wait(60)
        for number in range(NODES):
            node = self._hosts[f"node-{number}"].processes[-1]
            node.cont()
            node.signal(signal.SIGTERM)

    def strike(self, fault: Fault, strikes: Strikes) -> None:
        machine, number = self._hosts[f"node-{fault.victim}"], fault.victim
        if fault.kind == "master killed":
            if self._master.is_running:  # else it is down already, and comes back
                strikes.struck(fault, [])
                self._master.kill()
                strikes.after(min(fault.seconds, 4.0), self.up)
            return
        strikes.struck(fault, self._ranks_on(fault.victim, strikes))
        if fault.kind == "node killed":
            machine.processes[-1].kill()
            strikes.after(fault.seconds, lambda: self.join(number))
        elif fault.kind == "node frozen":
            frozen = machine.processes[-1]
            frozen.stop()
            strikes.after(fault.seconds, frozen.cont)
        else:
            machine.cut() if fault.kind == "cut" else machine.mute()
            strikes.after(fault.seconds, machine.join)

    def _ranks_on(self, number: int, strikes: Strikes) -> list[int]:
        """Ids of the ranks on a node's host, which has a network namespace of its own."""
        here = self._hosts[f"node-{number}"].link.namespace.stat().st_ino
        found = []
        for rank in strikes.see():
            try:
                found += [rank.pid] if os.stat(f"/proc/{rank.pid}/ns/net").st_ino == here else []
            except OSError:
                continue
        return found

    def _start(self, host: str, *words: str) -> Process:
        environment = {**self._trial.environment, "EVENER_TOKEN": self._token}
        return self._hosts[host].start([sys.executable, "-m", "evener", *words], environment=environment)


@pytest.mark.parametrize("seed", seeds("EVENER_SCHEDULES_ON_A_MASTER", "2"))
def test_master_run_ends_correctly_under_a_fault_schedule(
    seed: int, tmp_path: Path, alone: dict[str, torch.Tensor], build_hosts: Build
) -> None:
    kinds = ["node killed", "node killed", "node frozen", "cut", "one-way cut", "master killed"]
    faults = schedule(1000 + seed, kinds, span=12.0)
    nodes = [Host(name=f"node-{number}") for number in range(NODES)]
    with trial(tmp_path) as one, build_hosts(Host(name="master"), *nodes) as hosts:
        cluster = MasterAndNodes(hosts, one)
        run = cluster.train(write_task(tmp_path))
        one.shown = run.output
        end = strike_while(lambda: run.is_running, 1, faults, cluster.strike, one.strikes)
        code, text = run.wait(1), run.text
        late = time.monotonic() + 15
        while (left := ranks_of(one.marker)) and time.monotonic() < late:
            time.sleep(0.2)
        one.left["ranks"] = [rank.pid for rank in left]
        cluster.down()
        one.see_left()
        line = record("master", seed, one.strikes, end, one.judged(code, text, alone, end))
    require(line, text)
