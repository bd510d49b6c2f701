"""Runs of a command whose ranks are killed or frozen, and how far their weights are from those of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import TINY, command

WORDS = ("train", TINY, "--precision", "fp64", "--option", "samples=200", "--option", "schedule=true", "--epochs", "6")


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that stand for the nodes of a run, in the order in which they were started."""
    servers = [child for child in psutil.Process(pid).children() if "forkserver" in " ".join(child.cmdline())]
    return sorted((rank for server in servers for rank in server.children()), key=lambda rank: rank.pid)


def distance(one: Path, other: Path) -> float:
    """The largest difference between two runs' weights and running statistics."""
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def wait_for_first_epoch(tmp_path: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when the run has written its first checkpoint."""
    deadline = time.monotonic() + seconds
    while not (tmp_path / "struck" / "checkpoints").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_with(
    tmp_path: Path,
    strike: signal.Signals,
    nodes: str,
    pause: float,
    *more: str,
    victims: int = 1,
    wakes_after: float | None = None,
    start_seconds: float = 60.0,
    devices: str | None = None,
) -> TrainRecord:
    """The record of a run whose first ranks are struck after the first epoch. Raises AssertionError: what it said.

    Args:
        tmp_path: of the run.
        strike: signal that the ranks get.
        nodes: relative shares of the nodes, which are their speeds unless they are on devices.
        pause: seconds of a step.
        more: options.
        victims: number of ranks that are struck.
        wakes_after: seconds after which the first one goes on.
        start_seconds: within which the first epoch has to end.
        devices: of the nodes; None: local nodes.
    """
    where = ("--local-nodes", nodes) if devices is None else ("--devices", devices)
    words = (*where, "--option", f"pause={pause}", *more, "--output", "struck")
    shares = () if "--strategy" in more else ("--shares", nodes)
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            command(*WORDS, *words, *shares), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=errors
        )
    wait_for_first_epoch(tmp_path, process, start_seconds)
    struck = ranks_of(process.pid)[:victims]
    for rank in struck:
        os.kill(rank.pid, strike)
    if wakes_after is not None:
        time.sleep(wakes_after)
        os.kill(struck[0].pid, signal.SIGCONT)
    assert process.wait(timeout=90) == 0, (tmp_path / "errors").read_text()
    return read_noun(tmp_path / "struck" / "record.json", TrainRecord)
