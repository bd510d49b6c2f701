"""The comparison of a program on accelerators with one process: by a run of it on processors that ends with the result.

A process that uses an accelerator cannot be forked. So the first rank starts the program once more as it joins, with as
many ranks on the processors of its machine, which see no accelerator. They compare their first steps as always, write
the verdict, and end. Meanwhile the ranks on accelerators load models and data; they wait before their first step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from evener.frontends.programs.replica_files import discard_writes
from evener.records.atomic import atomic_write
from evener.records.plan import Check
from evener.records.record import Event
from evener.records.schema import Part

SECONDS = 600.0
"""Time after which the ranks wait no longer."""
_FILE = "EVENER_REHEARSAL"
_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""Variables by which a process sees no accelerator."""
_OF_LAUNCHERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "ROLE_", "TORCHELASTIC_", "SLURM_",
    "PMI_", "PMIX_", "OMPI_",
)  # fmt: skip
"""Beginnings of the variables by which launchers make a process a rank."""
MAX_RANKS = 4
"""Largest number of ranks of a rehearsal, each of which has the model and the data in memory."""
_LIKELIEST_TO_END = "1000"
"""What makes the kernel end a process before all others when memory is short."""


class Verdict(Part, frozen=True, kw_only=True):
    """The result of a comparison.

    Attributes:
        refusal: why the program would not train like one process; empty if it does.
        check: what was compared; None without a result.
        notes: for the user.
        shared_draws: shapes of random numbers that all samples share.
        is_delayed: whether the program computes batches later than it loads them.
    """

    refusal: str = ""
    check: Check | None = None
    notes: tuple[Event, ...] = ()
    shared_draws: tuple[tuple[int, ...], ...] = ()
    is_delayed: bool = False


def is_rehearsal() -> bool:
    """Whether this process belongs to a rehearsal."""
    return _FILE in os.environ


def begin_rehearsal() -> None:
    """Let this rank of a rehearsal write no files of the program, and end it before others if memory is short."""
    discard_writes(Path(os.environ[_FILE]).parent)


def give_way() -> None:
    """Let the kernel end this process, and those that it starts, before all others when memory is short."""
    with suppress(OSError):  # there is no such file on other systems than Linux
        Path("/proc/self/oom_score_adj").write_text(_LIKELIEST_TO_END)


def end_rehearsal(verdict: Verdict, *, is_leader: bool) -> NoReturn:
    """Write the verdict, and end this rank of the rehearsal, without the program's code for its end."""
    if is_leader:
        atomic_write(Path(os.environ[_FILE]), msgspec.json.encode(verdict))
    os._exit(0)


class Rehearsal:
    """A rehearsal under way.

    Args:
        script: the program.
        arguments: of the program.
        options: of `evener run`.
        size: number of ranks.
    """

    def __init__(self, script: Path, arguments: Sequence[str], options: Sequence[str], size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="evener-")
        self._file, self._said = Path(self._folder.name, "verdict"), Path(self._folder.name, "said")
        nodes = ("--local-nodes", ",".join(["1"] * size), "--run-folder", str(Path(self._folder.name, "run")))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evener", "run", *nodes, *options, str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**environment, **_HIDDEN, _FILE: str(self._file), "TMPDIR": self._folder.name},
            )

    def verdict(self) -> Verdict | str:
        """Wait for the verdict, and return it, or why there is none."""
        deadline = time.monotonic() + SECONDS
        while self._process.poll() is None and not self._file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        has_ended = self._process.poll() is not None
        said = self._said.read_text(errors="replace").strip().splitlines() if has_ended else []
        try:
            if self._file.exists():
                return msgspec.json.decode(self._file.read_bytes(), type=Verdict)
        finally:
            self.end()
        return said[-1].removeprefix("evener: ") if said else f"it has not ended within {SECONDS:g} s"

    def end(self) -> None:
        """End it, whether there is a verdict or not."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
