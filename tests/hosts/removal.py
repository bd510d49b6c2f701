"""Removes all that a set of hosts has made, known by its name alone: also what a killed run could not remove itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator

from hosts import groups, network
from hosts.names import PREFIX, dead_runs

_SECONDS = 10.0


def remove(name: str) -> None:
    """End every process in the namespaces and groups called `name.…`, then remove these; any of it may be gone.

    Raises:
        RuntimeError: a process does not end.
    """
    prefix = f"{name}."
    _end_processes(prefix)
    for namespace in network.namespaces(prefix):
        network.delete(namespace)
    for group in groups.groups(prefix):
        group.rmdir()


def sweep() -> None:
    """Remove what runs left behind whose process has died without doing so."""
    with _one_at_a_time():
        for name in dead_runs(names(PREFIX)):
            remove(name)


def names(prefix: str) -> list[str]:
    """Names of the namespaces and groups that begin with `prefix`."""
    return [*network.namespaces(prefix), *(group.name for group in groups.groups(prefix))]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C and a test's time limit wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Inside, no other process of this machine is inside; a lock on a folder leaves no file behind."""
    folder = os.open("/run", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _end_processes(prefix: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while processes := processes_of(prefix):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(processes)} of {prefix} do not end")
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def processes_of(prefix: str) -> set[int]:
    """Ids of the processes in namespaces and groups whose name begins with `prefix`."""
    inside = {process for namespace in network.namespaces(prefix) for process in network.processes_in(namespace)}
    return inside | {process for group in groups.groups(prefix) for process in groups.processes_of(group)}
