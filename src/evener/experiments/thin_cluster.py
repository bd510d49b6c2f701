"""A master and thin nodes on this machine, as the commands that a user types; they end with whoever started them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.errors import NodeLost
from evener.ps.master_client import MasterClient
from evener.wire.identity import Address, Token

_START_SECONDS = 60.0
_END_SECONDS = 10.0
_PAUSE_SECONDS = 0.05
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_COMMAND = (sys.executable, "-m", "evener.experiments.following")


class ThinCluster:
    """The processes of one; end it.

    Args:
        home: folder of the master, and of what the processes have to say.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(self, workers: int, data: Path, cache: Path) -> tuple[Address, Token]:
        """Start the master and, when it listens, the nodes; returns where it listens and with which token."""
        self._home.mkdir()
        master = self._start(
            "master", "up", "--home", str(self._home), "--listen", "127.0.0.1:0", "--insecure", "--json"
        )
        assert master.stdout is not None
        line = master.stdout.readline()
        if not line:
            raise NodeLost(f"the master did not start: {self._last_words('master')}")
        said = json.loads(line)
        for number in range(workers):
            name = f"worker-{number}"
            self._start(
                name, "join", said["address"], "--token", said["token"], "--insecure", "--thin",
                "--name", name, "--data", str(data), "--cache", str(cache),
            )  # fmt: skip
        return Address.parse(said["address"]), Token.parse(said["token"])

    def wait_for_nodes(self, control: MasterClient) -> None:
        """Return when all nodes have joined, so that all of them work from the beginning."""
        until = time.monotonic() + _START_SECONDS
        wanted = len(self._started) - 1
        while (joined := sum(node.state == "present" for node in control.ask().nodes)) < wanted:
            self.check()
            if time.monotonic() > until:
                raise NodeLost(f"only {joined} of {wanted} nodes joined within {_START_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)

    def check(self) -> None:
        """Raises NodeLost when one of the processes has ended."""
        for name, process in self._started.items():
            if process.poll() is not None:
                raise NodeLost(f"{name} has ended: {self._last_words(name)}")

    def end(self) -> None:
        """End all processes, the nodes first."""
        for process in reversed(self._started.values()):
            process.terminate()
        for process in self._started.values():
            with process:  # closes the pipes
                try:
                    process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _start(self, name: str, *words: str) -> subprocess.Popen[str]:
        with (self._home / f"{name}.txt").open("w") as errors:
            process = subprocess.Popen(
                [*_COMMAND, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if name == "master" else subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the command that the user typed
            )
        self._started[name] = process
        return process

    def _last_words(self, name: str) -> str:
        lines = (self._home / f"{name}.txt").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@contextmanager
def thin_cluster(workers: int, data: Path, folder: Path) -> Iterator[tuple[ThinCluster, MasterClient]]:
    """A master with `workers` thin nodes that have joined; all have ended when the block is left.

    Args:
        workers: number of nodes.
        data: folder of their data.
        folder: for a new home, and what the nodes of all such clusters remember.

    Raises:
        NodeLost: they did not start in time.
    """
    cluster = ThinCluster(folder / f"home-{workers}")
    try:
        address, token = cluster.start(workers, data, folder / "cache")
        with MasterClient(address, token, _START_SECONDS) as control:
            cluster.wait_for_nodes(control)
            yield cluster, control
    finally:
        cluster.end()
