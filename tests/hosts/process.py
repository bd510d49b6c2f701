"""A command that runs on a host: its output in a file, its end by its own id."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ENTER = """
set -e
echo "$1" > /proc/sys/kernel/hostname; shift
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift
exec "$@"
"""
"""Arguments: the host's name, folders of control groups, --, the command. All of it becomes the command in the end."""

_POLL_SECONDS = 0.01
_TAIL_LINES = 40
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Process:
    """A running command and all that it starts in its process group.

    Attributes:
        host: name.
        command: as it was asked for.
        output: file with what it has written to stdout and stderr.
    """

    host: str
    command: Sequence[str]
    output: Path
    _popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.output.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and its process group; to nobody if the command has ended."""
        if self.is_running:
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it at once, and wait until it has."""
        self.signal(signal.SIGKILL)
        self._popen.wait(_END_SECONDS)

    def stop(self) -> None:
        """Let it stand still."""
        self.signal(signal.SIGSTOP)

    def cont(self) -> None:
        """Let it go on after `stop`."""
        self.signal(signal.SIGCONT)

    def wait(self, seconds: float) -> int:
        """Its exit code, negative if a signal ended it.

        Raises:
            AssertionError: it still runs after `seconds`.
        """
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} still runs after {seconds} s") from None

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """The first match of `pattern` in its output.

        Raises:
            AssertionError: it ended, or `seconds` passed, without one.
        """
        deadline = time.monotonic() + seconds
        while True:
            was_running = self.is_running
            if match := re.search(pattern, self.text):
                return match
            assert was_running, f"{self} ended without writing {pattern!r}"
            assert time.monotonic() < deadline, f"{self} has not written {pattern!r} within {seconds} s"
            time.sleep(_POLL_SECONDS)

    def transcript(self) -> str:
        """How it ended and its last lines, for the report of a failed test."""
        state = "running" if self.is_running else f"exit code {self._popen.returncode}"
        return "\n".join([f"--- {self} ({state}):", *self.text.splitlines()[-_TAIL_LINES:]])

    def __str__(self) -> str:
        return f"{' '.join(self.command)} on host {self.host}"


def start(
    command: Sequence[str],
    *,
    host: str,
    namespace: Path,
    groups: Sequence[Path],
    output: Path,
    cwd: Path | None,
    environment: Mapping[str, str],
) -> Process:
    """Start `command` in a network namespace, in control groups, under the host's name as the machine's name."""
    enter = ["nsenter", f"--net={namespace}", "--", "unshare", "--uts", "--", "sh", "-c", _ENTER, "sh"]
    with output.open("wb") as file:
        popen = subprocess.Popen(
            [*enter, host, *map(str, groups), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
    return Process(host, command, output, popen)
