"""A master and nodes as users start them: each a command in a process of its own, all gone afterwards."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from evener.ps.client import MasterClient, find_master
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.status import ClusterStatus, NodeStatus
from support import foreign_system
from support.commands import command, evener, processes_of

WAIT_SECONDS = 60.0
_WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; sys.argv[0] = 'evener'; from evener.cli.app import main; main()"
)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` returns, once that is true."""
    until = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.1)
    return found


class Cluster:
    """What was started, and how to talk to it."""

    def __init__(self, folder: Path, *words: str, home: Path | None = None) -> None:
        self.folder, self.home = folder, home or folder / "home"
        self.marker = f"EVENER_TEST={uuid.uuid4()}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address, self.token = "", ""
        self.up("--listen", "127.0.0.1:0", *words)

    def up(self, *words: str) -> None:
        """Start the master of this home, for the first time or again."""
        typed = command("up", "--json", "--home", str(self.home), *words)
        self.master = self._start(typed, output="up.json")
        found = wait_until(lambda: (self.folder / "up.json").read_text(), "that the master is up")
        said = json.loads(found)
        if self.address:
            assert (said["address"], said["token"]) == (self.address, self.token)
        self.address, self.token = said["address"], said["token"]
        assert said["pid"] == self.master.pid

    def join(
        self,
        name: str,
        *words: str,
        has_torch: bool = True,
        device: str = "cpu",
        memory_bytes: int | None = None,
        core: int | None = None,
        foreign: str | None = None,
    ) -> None:
        """Start a node; or one that cannot import PyTorch, has so much address space, or is bound to one core.

        With `foreign`, it runs on a simulated system without POSIX, with these libraries.
        """
        own = ("--name", name, "--device", device, "--cache", str(self.folder / f"cache-{name}"))
        words = ("join", self.address, "--token", self.token, *own, *words)
        typed = command(*words) if has_torch else [sys.executable, "-c", _WITHOUT_TORCH, *words]
        if foreign is not None:
            typed = [sys.executable, foreign_system.__file__, foreign, "evener", *words]
        self.nodes[name] = self._start(typed, output=f"{name}.out", limit=partial(_limit, memory_bytes, core))

    def join_unnamed(self, label: str) -> None:
        """Start a node as the user who gives it no name; `label` is for its output."""
        typed = ("join", self.address, "--token", self.token, "--device", "cpu", "--cache", str(self.folder / "cache"))
        self.nodes[label] = self._start(command(*typed), output=f"{label}.out")

    def wait_for_nodes(self) -> dict[str, NodeStatus]:
        """All nodes by name, once all that were started are measured."""

        def joined() -> dict[str, NodeStatus]:
            found = {node.name: node for node in self.ask().nodes}
            return found if all(name in found and found[name].score for name in self.nodes) else {}

        found: dict[str, NodeStatus] = wait_until(joined, "that all nodes join")
        return found

    def ask(self) -> ClusterStatus:
        """What `evener nodes` is told, without a process that starts only for that."""
        with MasterClient(*find_master(StateDir(self.home), None, None)) as control:
            return control.ask()

    def version(self) -> int:
        """Updates of the run that goes on; 0 if there is none."""
        run = self.ask().run
        return run.version if run else 0

    def state(self, name: str) -> str:
        """Of a node; empty if it was never there."""
        return next((node.state for node in self.ask().nodes if node.name == name), "")

    def evener(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        return evener(*words, cwd=self.folder, timeout=timeout)

    def train(self, *words: str, has_torch: bool = True) -> Any:
        """What `evener train ... --json` says, where PyTorch is or where it is missing."""
        words = ("train", *words, "--home", str(self.home), "--json")
        typed = command(*words) if has_torch else [sys.executable, "-c", _WITHOUT_TORCH, *words]
        result = subprocess.run(typed, cwd=self.folder, capture_output=True, text=True, timeout=90, check=False)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.strip().splitlines()[-1])

    def start_training(self, *words: str) -> subprocess.Popen[bytes]:
        """`evener train` in the background; its output is in train.out."""
        return self._start(command("train", *words, "--home", str(self.home)), output="train.out")

    def down(self) -> None:
        """`evener down`; then nothing is left running."""
        result = self.evener("down", "--home", str(self.home))
        assert result.returncode == 0, result.stderr
        wait_until(lambda: not processes_of(self.marker), "that all processes end")

    def said(self, name: str) -> str:
        """What a process told its user."""
        return (self.folder / name).with_suffix(".err").read_text()

    def close(self) -> None:
        """End what is left."""
        for pid in processes_of(self.marker):
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()

    _started: list[subprocess.Popen[bytes]]

    def _start(
        self, typed: Sequence[str], output: str, limit: Callable[[], None] | None = None
    ) -> subprocess.Popen[bytes]:
        name, value = self.marker.split("=")
        path = self.folder / output
        with path.open("wb") as out, path.with_suffix(".err").open("ab") as err:
            process = subprocess.Popen(
                typed,
                cwd=self.folder,
                stdout=out,
                stderr=err,
                env={**os.environ, name: value, "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
                preexec_fn=limit,
            )
        self._started = [*getattr(self, "_started", []), process]
        return process


def _limit(memory_bytes: int | None, core: int | None) -> None:
    """Bound the process that calls this, where something is given."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextmanager
def cluster(*words: str, home: Path | None = None) -> Iterator[Cluster]:
    """A master, with a folder of its own or with `home`; everything that was started is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        one = Cluster(Path(folder), *words, home=home)
        try:
            yield one
        finally:
            one.close()
