"""A run goes on when a process of it is killed, with another in its place, and trains what one process trains."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from evener.record import TrainRecord
from evener.schema import read_noun
from support.commands import TINY, command, evener_here

pytestmark = pytest.mark.alone
WORDS = ("train", TINY, "--precision", "fp64", "--option", "samples=200", "--option", "schedule=true", "--epochs", "6")


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that stand for the nodes of a run, in the order in which they were started."""
    servers = [child for child in psutil.Process(pid).children() if "forkserver" in " ".join(child.cmdline())]
    return sorted((rank for server in servers for rank in server.children()), key=lambda rank: rank.pid)


def off(one: Path, other: Path) -> float:
    """The largest difference between two runs' weights and running statistics."""
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def run_with(tmp_path: Path, strike: signal.Signals, nodes: str, pause: float, *more: str) -> TrainRecord:
    """The record of a run whose first rank is struck after the first epoch."""
    shares = ("--local-nodes", nodes, "--shares", nodes, "--elastic", "--option", f"pause={pause}")
    process = subprocess.Popen(
        command(*WORDS, *shares, *more, "--output", "struck"), cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "struck" / "checkpoints").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(ranks_of(process.pid)[0].pid, strike)
    assert process.wait(timeout=90) == 0
    return read_noun(tmp_path / "struck" / "record.json", TrainRecord)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """What one process trains."""
    result = evener_here(*WORDS, "--output", "alone", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return tmp_path / "alone"


def test_the_first_rank_is_killed_and_the_model_is_that_of_one_process(tmp_path: Path, alone: Path) -> None:
    record = run_with(tmp_path, signal.SIGKILL, "1,0.5", 0.03, "--patience", "20")
    assert off(alone, tmp_path / "struck") < 1e-10
    lost = [event for event in record.events if event.kind == "node lost"]
    assert len(lost) == 1
    assert lost[0].message.startswith("node-0 was killed by signal 9 (SIGKILL); 1 node of 2 go on with step ")
    assert 0 < record.goodput < 1
    assert sum(step.samples for step in record.steps) == 6 * 200
    assert len(record.validations) == 6
