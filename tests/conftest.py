"""A test that leaves a process, a thread, a process group or an environment variable behind has failed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from hypothesis import settings

# Several workers share few cores. Threads of PyTorch that spin while they wait would take half of all processor time.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _not_synced(file: Any) -> None:
    """Raise as `os.fsync` does if the file is not open, and wait for no disk: it took a third of some tests.

    A killed process loses nothing that it has written; only a machine without power does, which no test is about.
    """
    os.fstat(file if isinstance(file, int) else file.fileno())


mock.patch.object(os, "fsync", _not_synced).start()

if os.environ.get("EVENER_TEST_SYSTEM") == "windows":
    from support.foreign_system import leave_posix

    leave_posix()

if os.environ.get("EVENER_TEST_DEVICE", "").startswith("standin"):
    from support import standin

    if not standin.why_not():
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *standin.PATHS])
        standin.load()

pytest_plugins = ["support.autodiff_fixtures", "support.wire_fixtures", "support.told_clock"]

settings.register_profile("evener", deadline=None)  # pytest's limit on every test is the limit; machines are shared
settings.load_profile("evener")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that do not mention a mark that all selected tests have, where few files do."""
    if not collection_path.match("test_*.py"):
        return None
    wanted, text = re.split(r"\s+and\s+", config.getoption("markexpr")), collection_path.read_text()
    is_other = ("alone" in wanted and "mark.alone" not in text) or (
        "cuda" in wanted and "mark.cuda" not in text and "needs_device" not in text.lower()
    )
    return is_other or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need POSIX where it is missing, or hidden."""
    if not hasattr(os, "fork"):
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip("needs Linux or macOS"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: modules and tests stay until the end and are never traversed again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that processes are forked from, with all that ranks import, before many tests.

    The first test that needs it would decide what it imports, and ranks of later tests would each import the rest.
    """
    if len(session.items) > _MANY and hasattr(os, "fork"):
        from evener.launch.processes import RANK_MODULES, LocalProcesses

        with LocalProcesses(RANK_MODULES):
            pass


_MANY = 1000
_SERVERS = ("forkserver", "resource_tracker", "exact.nursery")
"""Helpers that live as long as this process."""
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_SECONDS = 10.0
"""For what is ending to end, on a machine that does much else."""


def _descendants(pid: int) -> list[int]:
    """Ids of a process's children and of theirs. psutil would read every process of the machine for them."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _children() -> list[psutil.Process]:
    """Processes started here that still run, the standard library's helpers left out."""
    found = []
    for pid in _descendants(os.getpid()):
        try:
            child = psutil.Process(pid)
            line = " ".join(child.cmdline())
            is_server = any(name in line for name in _SERVERS) and child.ppid() == os.getpid()
            if not is_server and child.status() not in _ENDED:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


_SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "RAY_CLIENT_MODE",
    "_RJEM_MALLOC_CONF",
}  # fmt: skip
"""By pytest, PyTorch, Lightning, Ray and Polars, for themselves."""


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("evener")}


def _return_memory() -> None:
    """Large models, known to their hooks, would wait for the collector, and glibc would keep their pages."""
    gc.collect()
    if os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = dict(os.environ)
    yield
    if request.node.get_closest_marker("slow"):
        _return_memory()
    deadline = time.monotonic() + _SECONDS
    while (left := (_children(), _threads())) != ([], set()) and time.monotonic() < deadline:
        if time.monotonic() > deadline - _SECONDS / 2:
            gc.collect()  # an error's traceback may hold a group, whose connections end with it
        time.sleep(0.05)
    assert left == ([], set())
    changed = {key for key in os.environ.keys() | before.keys() if os.environ.get(key) != before.get(key)}
    assert changed - _SET_BY_OTHERS == set()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only counting of references frees memory while this holds."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
