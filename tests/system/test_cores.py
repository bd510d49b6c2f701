"""How many cores a process may use, from trees of files like the kernel's; and how many threads compute in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.system import control_groups, cores
from evener.system.cores import usable_cores

MEMBERSHIP = {1: "5:cpuacct,cpu:/job\n0::/job\n", 2: "0::/pods/job\n"}


def hold(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], membership: str, bound: int = 8) -> None:
    """From now on the kernel has these `files`, says of this process `membership`, and binds it to so many cores."""
    for name, text in {**files, "membership": membership}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(control_groups, "_ROOT", root)
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", root / "membership")
    monkeypatch.setattr(cores, "_bound_cores", lambda: bound)


@pytest.mark.parametrize(
    ("version", "files", "wanted"),
    [
        (1, {"cpu/job/cpu.cfs_quota_us": "150000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 2),
        (1, {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8),
        (1, {"cpu/job/cpu.cfs_quota_us": "5000\n", "cpu/job/cpu.cfs_period_us": "10000\n"}, 1),
        (1, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (2, {"pods/job/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, 4),
        (2, {"pods/job/cpu.max": "100000 100000\n", "pods/cpu.max": "400000 100000\n"}, 1),
        (2, {"pods/job/cpu.max": "6400000 100000\n"}, 8),
        (2, {"pods/job/cpu.max": "garbage\n"}, 8),
        (2, {}, 8),
    ],
)
def test_usable_cores_follow_the_tightest_control_group(
    version: int, files: dict[str, str], wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(tmp_path, monkeypatch, files, MEMBERSHIP[version])
    assert usable_cores() == wanted


COMPUTES = """
import os
from evener.system import cores
cores._bound_cores = lambda: 4
cores._quotas = lambda: [1.5]
import numpy as np
from threadpoolctl import threadpool_info
before = [one["num_threads"] for one in threadpool_info()]
cores.keep_to_quota()
after = [one["num_threads"] for one in threadpool_info()]
print(os.environ["OMP_NUM_THREADS"], max(after, default=2) <= 2, before == after)
"""


@pytest.mark.parametrize(("named", "said"), [({}, "2 True"), ({"OMP_NUM_THREADS": "1"}, "1 True True")])
def test_numpy_uses_the_allowed_threads_unless_the_user_sets_them(named: dict[str, str], said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | named
    typed = [sys.executable, "-c", COMPUTES]
    result = subprocess.run(typed, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(said)


BOUND = """
import os
from evener.system.cores import bind_to, unbind
before = os.sched_getaffinity(0)
bind_to([max(before)])
if (copy := os.fork()) == 0:  # copies that compute in the background take cores that idle
    unbind()
    os._exit(os.sched_getaffinity(0) != before)
assert os.waitpid(copy, 0)[1] == 0
assert os.sched_getaffinity(0) == {max(before)}
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_forked_process_can_use_all_cores_again() -> None:
    subprocess.run([sys.executable, "-c", BOUND], check=True)
