"""A master and thin nodes on this machine, as the very commands that a user types."""

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
from evener.star.control import Control
from evener.wire import Address, Token

_START_SECONDS = 30.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@contextmanager
def thin_cluster(workers: int, data: Path, folder: Path) -> Iterator[Control]:
    """A connection to a master with `workers` thin nodes, all of which have ended when the block is left.

    Raises:
        NodeLost: they did not start in time.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        master = _start(started, "up", "--home", str(folder), "--listen", "127.0.0.1:0", "--insecure", "--json")
        assert master.stdout is not None
        words = json.loads(master.stdout.readline() or "{}")
        if not words:
            raise NodeLost("the master did not start")
        for number in range(workers):
            _start(
                started, "join", words["address"], "--token", words["token"], "--insecure", "--thin",
                "--name", f"worker-{number}", "--data", str(data), "--cache", str(folder / "cache"),
            )  # fmt: skip
        with Control(Address.parse(words["address"]), Token.parse(words["token"]), _START_SECONDS) as control:
            _await(control, workers)
            yield control
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _start(started: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE if words[0] == "up" else subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-m", "evener", *words],
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_ONE_THREAD},
    )
    started.append(process)
    return process


def _await(control: Control, workers: int) -> None:
    until = time.monotonic() + _START_SECONDS
    while sum(node.state == "present" for node in control.ask().nodes) < workers:
        if time.monotonic() > until:
            raise NodeLost(f"fewer than {workers} nodes joined within {_START_SECONDS:.0f} s")
        time.sleep(0.1)
