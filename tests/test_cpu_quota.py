"""A CPU quota: which speed it leaves a node, where it is named, and that a node's rate under a real one is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.benchmark.processor_time import ProcessorTime, ProcessorWatch, quota_sentence, taken_by_others
from evener.doctor.examine import load_facts
from evener.doctor.machine_checks import check_machine
from evener.launch.nodes import local_nodes, parse_local_nodes
from evener.system import control_groups, cores
from evener.system.cores import cpu_quota, quota_speed, throttled_seconds, usable_cores
from support.machine_facts import SOUND

VERSION_1 = {"cpu.cfs_quota_us": "33000\n", "cpu.cfs_period_us": "100000\n", "cpu.stat": "throttled_time 2500000000\n"}
VERSION_2 = {"cpu.max": "33000 100000\n", "cpu.stat": "nr_throttled 9\nthrottled_usec 2500000\n"}
REAL = Path("/sys/fs/cgroup/cpu")


@pytest.fixture(params=["version 1", "version 2", "a namespace"])
def a_third_of_a_core(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's control group, which allows it 0.33 of two cores."""
    is_first = request.param != "version 2"
    group = tmp_path / ("cpu/job" if is_first else "job")
    group.mkdir(parents=True)
    for name, text in (VERSION_1 if is_first else VERSION_2).items():
        (group / name).write_text(text)
    path, root = ("/job", "/") if request.param != "a namespace" else ("/", "/..")
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (tmp_path / "membership").write_text(f"5:cpu:{path}\n" if is_first else f"0::{path}\n")
    (tmp_path / "mounts").write_text(f"32 31 0:29 {root} {tmp_path / 'cpu'} rw - cgroup cgroup rw,cpu\n")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(control_groups, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cores, "_bound_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return group


@pytest.mark.usefixtures("a_third_of_a_core")
def test_node_speed_follows_its_quota_and_several_share_it() -> None:
    assert (usable_cores(), cpu_quota()) == (1, 0.33)
    assert [quota_speed(processes) for processes in (1, 3)] == pytest.approx([0.33, 0.11])
    assert [node.speed_at(0) for node in local_nodes(["cpu"])] == pytest.approx([0.33])
    assert [node.speed_at(0) for node in local_nodes(["cuda:0", "cpu", "cpu"])] == pytest.approx([1.0, 0.165, 0.165])
    assert [node.speed_at(0) for node in parse_local_nodes("1,0.5")] == pytest.approx([0.22, 0.11])
    assert [node.speed_at(0) for node in parse_local_nodes("0.2,0.1")] == pytest.approx([0.2, 0.1])


@pytest.mark.usefixtures("a_third_of_a_core")
def test_quota_is_named_by_the_doctor_and_the_processor_watch() -> None:
    load = load_facts(0.01)
    assert load.quota == 0.33
    device = next(one for one in check_machine(replace(SOUND, load=load)) if one.what == "device")
    assert "0.33" in device.sentence
    own = ProcessorWatch("a").stop()
    assert own.quota == 0.33
    assert "0.33 cores on a" in quota_sentence([own, ProcessorTime(node="b", ran=1.0, waited=0.0)])
    assert quota_sentence([ProcessorTime(node="b", ran=1.0, waited=0.0)]) == ""


def test_throttled_time_is_not_attributed_to_other_processes(a_third_of_a_core: Path) -> None:
    counts = a_third_of_a_core / "schedstat"
    counts.write_text("1000000000 1000000000 7\n")
    assert throttled_seconds() == 2.5
    watch = ProcessorWatch("a", counts=counts)
    counts.write_text("2000000000 3000000000 7\n")
    for name, text in {"cpu.stat": "throttled_time 4500000000\nthrottled_usec 4500000\n"}.items():
        (a_third_of_a_core / name).write_text(text)
    own = watch.stop()
    assert (own.ran, own.waited) == pytest.approx((1.0, 0.0))
    assert taken_by_others([own]) == {"a": 0.0}


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A control group of version 1 that allows a third of a core."""
    group = REAL / f"evener-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("33000")
    except OSError:
        pytest.skip("this process may not make control groups of version 1")
    yield group
    group.rmdir()


MEASURES = """
import json, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
import numpy as np
from evener.benchmark.numpy_device import profile_numpy
from evener.system.cores import keep_to_quota
from evener.launch.nodes import local_nodes
keep_to_quota()
a, b = (np.random.default_rng(0).standard_normal((256, 256)) for _ in range(2))
rates = []
for _ in range(2):  # the machine may be busier at one time than at another
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 1.5:
        a @ b
        count += 1
    rates.append(2 * 256**3 * count / (time.perf_counter() - begin))
    profile = profile_numpy("a", local_nodes(["cpu"])[0].speed_at(0), seconds=1.0)
print(json.dumps([max(rates), profile.throughputs[0].matmul_flops, profile.cores]))
"""


def test_rate_measured_under_a_real_quota_is_sustainable(real_group: Path) -> None:
    typed = [sys.executable, "-c", MEASURES, str(real_group)]
    result = subprocess.run(typed, capture_output=True, text=True, check=True, timeout=60)
    kept_up, measured, used = json.loads(result.stdout)
    assert used == 1
    assert measured < 2 * kept_up
