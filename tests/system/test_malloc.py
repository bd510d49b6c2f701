"""What a process frees and takes again is not given new pages by the system, unless the user wants it otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from evener.system.malloc import kept_bytes

STEPS = """
import resource, sys
import torch
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import run_inprocess
def step():
    for mib in (50, 40, 3, 50):
        torch.ones(mib << 18)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def steps(*_):
    for _ in range(5):
        step()
    before = faults()
    for _ in range(3):
        step()
    print((faults() - before) * resource.getpagesize() >> 20)
if "rank" in sys.argv:
    run_inprocess(steps, parse_local_nodes("1")[0], None, patience=60, on_event=print)
else:
    steps()
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other ways")


def new_mib(*arguments: str, **variables: str) -> int:
    """MiB that the system gives to three steps of a process that had five before; each takes 143."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_rank_reuses_freed_memory() -> None:
    assert new_mib() > 350
    assert new_mib("rank") < 20


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")]
)
def test_user_settings_of_malloc_take_precedence(name: str, value: str) -> None:
    assert new_mib("rank", **{name: value}) > 350


def test_unrelated_tunable_changes_nothing() -> None:
    assert new_mib("rank", GLIBC_TUNABLES="glibc.malloc.arena_max=4") < 20


def test_retained_bytes_are_measured() -> None:
    pieces = [bytearray(100_000) for _ in range(100)]
    before = kept_bytes()
    del pieces[::2]
    assert 4_900_000 < kept_bytes() - before < 5_200_000
