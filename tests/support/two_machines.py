"""Two ranks, each of which torchrun would have started on a machine of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.commands import TINY
from support.sockets import free_port


def on_two_machines(words: Sequence[str], folder: Path, variables: Mapping[str, str] = {}) -> list[tuple[int, str]]:
    """Exit code and stderr of two ranks, each of which torchrun would have started on a machine of its own."""
    paths = [str(Path(TINY).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "EVENER_SECRET": "a secret of the tests",
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "COLUMNS": "300", **variables,
    }  # fmt: skip
    ranks = []
    for number in ("0", "1"):
        (folder / number).mkdir(exist_ok=True)
        own = {"RANK": number, "GROUP_RANK": number}
        ranks.append(
            subprocess.Popen(
                [sys.executable, *words], cwd=folder / number, env=shared | own, text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]
