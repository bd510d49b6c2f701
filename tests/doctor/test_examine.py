"""What is read of this machine: true where a fault is really there, twenty times the same where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evener.doctor import examine as examine_module
from evener.doctor.examine import driver_gpus, examine, folder_facts, load_facts, visible_gpus
from evener.doctor.facts import MachineFacts
from evener.doctor.finding import faults
from evener.doctor.machine_checks import check_machine
from evener.doctor.network import network_facts

OF_THE_MOMENT = {"load", "heat", "memory", "interface"}
"""What a shared machine, or one whose name is not known, may truly have."""


@pytest.mark.slow
def test_examining_a_sound_machine_20_times_finds_no_fault(tmp_path: Path) -> None:
    found = [faults(check_machine(examine({"runs": tmp_path}, machine="here"))) for _ in range(20)]
    assert [[fault.words for fault in one if fault.what not in OF_THE_MOMENT] for one in found] == [[]] * 20


def test_facts_describe_this_machine_and_survive_json(tmp_path: Path) -> None:
    import msgspec

    facts = examine({"runs": tmp_path / "not" / "there"}, machine="here")
    assert facts.folders[0].path == str(tmp_path)
    assert 0 < facts.free_bytes <= facts.total_bytes <= facts.machine_bytes
    assert facts.load.cores == len(os.sched_getaffinity(0))
    assert msgspec.json.decode(msgspec.json.encode(facts), type=MachineFacts) == facts


def test_busy_core_is_named_by_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            facts = [load_facts(0.3) for _ in range(3)]
        finally:
            busy.kill()
    assert max(one.busy_cores for one in facts) > 0.5
    assert all(one.busiest for one in facts)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, timeout=20)
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=20)


def test_full_disk_is_detected(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(10**6))
    facts = folder_facts("runs", small_disk / "runs")
    assert facts.path == str(small_disk)
    assert facts.free_bytes < 10**5


def test_throttle_counts_before_the_measurement_are_ignored(tmp_path: Path) -> None:
    for core in ("cpu0", "cpu1"):
        count = tmp_path / core / "thermal_throttle" / "core_throttle_count"
        count.parent.mkdir(parents=True)
        count.write_text("7\n")
    assert load_facts(0.01, tmp_path).hot_cores == 0


def test_host_name_and_variables_are_read() -> None:
    facts = network_facts({"GLOO_SOCKET_IFNAME": "eth3"}, "localhost", "127.0.0.1")
    assert "127.0.0.1" in facts.host_addresses
    assert (facts.route_address, facts.gloo_interfaces) == ("127.0.0.1", "eth3")
    assert facts.route is not None
    assert facts.route.is_loopback
    assert network_facts({}, "no-such-machine.invalid", "127.0.0.1").host_addresses == ()


SMI = """#!/bin/sh
echo "NVIDIA H100 80GB HBM3, 570.86.15, 81559, 81000, Not Active, Active"
echo "NVIDIA T4, 570.86.15, [N/A], [N/A], Not Active, Not Active"
"""


def test_nvidia_smi_output_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    (first, second), problem = driver_gpus()
    assert (first.name, first.total_bytes, first.is_hot, problem) == ("NVIDIA H100 80GB HBM3", 81559 << 20, True, "")
    assert (second.free_bytes, second.is_hot) == (0, False)
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert driver_gpus() == ((), "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch")


@pytest.mark.parametrize(("chosen", "count"), [(None, 4), ("", 0), ("1,2", 2), ("0,-1,2", 1), ("0,1,2,3,4", 4)])
def test_visible_devices_variable_counts_gpus_like_cuda(chosen: str | None, count: int) -> None:
    assert visible_gpus(4, chosen) == count


def test_torch_gpus_are_unknown_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examine_module, "_OTHER_DRIVER", tmp_path / "none")
    assert examine_module.torch_gpus(0) is None


@pytest.mark.parametrize(("percents", "busy"), [([100.0, 0.0], 0.0), ([100.0, 60.0], 0.6), ([0.0, 0.0], 0.0)])
def test_load_on_cores_outside_the_container_is_ignored(
    percents: list[float], busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine_module, "usable_cores", lambda: 1)
    monkeypatch.setattr(examine_module, "_bound_cores", lambda _: [0, 1])
    monkeypatch.setattr(psutil, "cpu_percent", lambda **_: percents)
    facts = load_facts(0.01)
    assert facts.cores == 1
    assert facts.busy_cores == pytest.approx(busy)
