"""The equivalence check of a program or BatchTask on accelerators, by a second run of it on CPUs.

A process that uses an accelerator cannot be forked. So the first rank starts the program once more when it joins, with
up to four ranks on the CPUs of its machine. Accelerators are hidden from them, except those of Apple. These ranks
compare their first steps as always, write the result, and end. Meanwhile the ranks on accelerators load models and
data; before their first step they wait for the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from evener.frontends.programs.replica_files import discard_writes
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput
from evener.records.plan import Check
from evener.records.record import Event
from evener.records.schema import Part
from evener.system.process_exit import launch_folder

SECONDS = 600.0
"""Longest wait of the ranks for the result."""
_FILE = "EVENER_CPU_CHECK"
"""Variable that contains the path of the result, in the processes of such a check."""
_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""Variables that hide accelerators from a process."""
_LAUNCHER_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"})
_LAUNCHER_PREFIXES = ("MASTER_", "ROLE_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")
"""Launchers make a process a rank by these variables, and by those that begin like this."""
MAX_RANKS = 4
"""Largest number of ranks of a check; each rank loads the model and the data."""
_FIRST_TO_KILL = "1000"
"""Largest `oom_score_adj` of Linux: when memory is short, the kernel kills this process before others."""


class CheckResult(Part, frozen=True, kw_only=True):
    """The result of a check.

    Attributes:
        refusal: why the program would not train like one process; empty if it does.
        check: what was compared; None without a comparison.
        notes: for the user.
        shared_draws: shapes of random numbers that all samples share.
        is_delayed: whether the program computes batches later than it loads them.
        has_others: whether it trains on batches from elsewhere while a divided one is current.
    """

    refusal: str = ""
    check: Check | None = None
    notes: tuple[Event, ...] = ()
    shared_draws: tuple[tuple[int, ...], ...] = ()
    is_delayed: bool = False
    has_others: bool = False


Command: TypeAlias = Callable[[Path], Sequence[str]]


def shares_of_check(shares: str, size: int) -> str:
    """Return `--shares` for the `size` ranks of a check."""
    first = shares.split(",")[:size]
    return shares if "," not in shares else ",".join(first) if any(map(float, first)) else "equal"


def is_cpu_check() -> bool:
    """Whether this process belongs to a check on CPUs."""
    return _FILE in os.environ


def begin_cpu_check() -> None:
    """Discard what the program writes in this rank of a check on CPUs."""
    discard_writes(Path(os.environ[_FILE]).parent)


def yield_memory() -> None:
    """Let the kernel kill this process, and those that it starts, before all others when memory is short."""
    with suppress(OSError):  # only Linux has this file
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL, encoding="utf-8")


def end_cpu_check(result: CheckResult, *, is_leader: bool) -> NoReturn:
    """Write the result, and end this rank of the check without running more of the program, such as its `finally`."""
    if is_leader:
        atomic_write(Path(os.environ[_FILE]), msgspec.json.encode(result))
    os._exit(0)


class CpuCheck:
    """A check on CPUs that has begun.

    Args:
        command: returns the arguments of the Python that starts the ranks, which may use a folder.

    Raises:
        InvalidInput: `command` does.
    """

    def __init__(self, command: Command) -> None:
        # its processes may still write when the folder is removed; the starter of this one removes the rest
        self._folder = tempfile.TemporaryDirectory(prefix="evener-", dir=launch_folder(), ignore_cleanup_errors=True)
        self._file, self._output = Path(self._folder.name, "result"), Path(self._folder.name, "output")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
        }
        try:
            arguments = command(Path(self._folder.name))
        except InvalidInput:
            self._folder.cleanup()
            raise
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, **_HIDDEN, _FILE: str(self._file), "TMPDIR": self._folder.name},
            )

    def result(self) -> CheckResult | str:
        """Wait for the result, end the check, and return the result, or why there is none."""
        deadline = time.monotonic() + SECONDS
        while self._process.poll() is None and not self._file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        has_ended = self._process.poll() is not None
        lines = self._output.read_text(errors="replace").strip().splitlines() if has_ended else []
        try:
            if self._file.exists():
                return decode_json(self._file.read_bytes(), CheckResult)
        finally:
            self.end()
        if not has_ended:
            return f"it has not ended within {SECONDS:g} s"
        return lines[-1].removeprefix("evener: ") if lines else "it ended without a word"

    def end(self) -> None:
        """End the check, whether it has a result or not."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
