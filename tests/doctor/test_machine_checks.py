"""Planted faults, as facts of a machine: each is named with the machine and a cure, and a sound machine has none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evener.doctor.facts import FolderFacts, GpuFacts, LoadFacts
from evener.doctor.finding import Finding, faults, has_error
from evener.doctor.machine_checks import SHARED, check_machine
from evener.records.errors import InvalidValue
from support.machine_facts import SOUND, interface
from support.refusals import refused

GPU = GpuFacts(name="RTX 4090", driver="570.86", total_bytes=24 << 30, free_bytes=23 << 30, is_hot=False)
WITH_GPU: dict[str, Any] = {"gpus": (GPU,), "visible_gpus": 1, "torch_gpus": 1}


def folder(**words: Any) -> dict[str, Any]:
    sound = FolderFacts(purpose="runs", path="/runs", free_bytes=10**11, has_inodes=True, is_writable=True)
    return {"folders": (replace(sound, **words),)}


def load(**words: Any) -> dict[str, Any]:
    return {"load": replace(LoadFacts(cores=8, busy_cores=0.1), **words)}


def network(**words: Any) -> dict[str, Any]:
    return {"network": replace(SOUND.network, **words)}


FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"gpu_problem": "nvidia-smi fails: Driver/library version mismatch"}, "GPU", "error", "mismatch; reinstall"),
    ({**WITH_GPU, "torch_gpus": 0}, "GPU", "error", "can use 0 of 1 GPUs"),
    ({**WITH_GPU, "gpus": (replace(GPU, is_hot=True),)}, "heat", "warning", "GPU 0 (RTX 4090) slows down"),
    ({**WITH_GPU, "gpus": (replace(GPU, free_bytes=10**9),)}, "GPU", "warning", "has 1.0 GB of 25.8 GB free"),
    ({"free_bytes": 5 * 10**8}, "memory", "warning", "500 MB of 16.0 GB are free; end other programs"),
    ({"free_bytes": 10**8, "total_bytes": 10**9}, "memory", "error", "that a control group allows"),
    (folder(free_bytes=10**6), "disk", "error", "/runs (runs) has 1 MB free; remove files"),
    (folder(free_bytes=10**9), "disk", "warning", "/runs (runs) has 1.0 GB free"),
    (folder(has_inodes=False), "disk", "error", "/runs (runs) takes no further files"),
    (folder(is_writable=False), "disk", "error", "cannot be written into; change its owner"),
    (folder(purpose=SHARED, path="/dev/shm", free_bytes=64 << 20), "disk", "warning", "--shm-size=1g"),
    (load(busy_cores=1.2, busiest="blender (pid 7)", busiest_cores=1.0), "load", "warning", "1.0 of it by blender"),
    (load(stolen=0.3), "load", "warning", "gives 30% of its time to others"),
    (load(hot_cores=2), "heat", "warning", "2 cores were slowed down"),
    ({"clock": 0.0}, "clock", "error", "1970-01-01 00:00:00 UTC, which is before Evener's files were written"),
    ({"task_problem": "my_task.py line 1: ModuleNotFoundError: No module named 'einops'"}, "task", "error", "einops"),
    (network(host_addresses=("172.17.0.1",)), "interface", "warning", "Gloo will take docker0 (172.17.0.1)"),
    (network(gloo_interfaces="eth7"), "interface", "error", "$GLOO_SOCKET_IFNAME is eth7, and no interface"),
    (network(gloo_interfaces="lo"), "interface", "warning", "loopback: $GLOO_SOCKET_IFNAME says so; set GLOO"),
    (network(nccl_interfaces="=eth"), "interface", "error", "$NCCL_SOCKET_IFNAME is =eth"),
    (network(route_address="127.0.0.1"), "interface", "warning", "no network interface leads to other machines"),
    (network(interfaces=(interface("eth0", "10.0.0.5", mtu=576),)), "MTU", "warning", "576 bytes at most; `ip link"),
]  # fmt: skip


@pytest.mark.parametrize(("planted", "what", "severity", "words"), FAULTS)
def test_planted_fault_is_the_only_one_with_machine_and_remedy(
    planted: dict[str, Any], what: str, severity: str, words: str
) -> None:
    [fault] = faults(check_machine(replace(SOUND, **planted)))
    assert (fault.machine, fault.what, fault.severity) == ("ada", what, severity)
    assert words in fault.words
    assert fault.cure
    assert len(fault.words) < 300


@pytest.mark.parametrize(
    "words",
    [
        {},
        WITH_GPU,
        {"torch": ""},
        {"task_problem": ""},
        network(host_addresses=("127.0.1.1",)),
        network(host_addresses=()),
        network(host_addresses=("10.9.9.9",)),
        load(cores=128, busy_cores=3.0),
        network(gloo_interfaces="eth0", nccl_interfaces="^docker,lo"),
        network(host_addresses=("fe80::1", "10.0.0.5")),
    ],
)
def test_sound_machine_has_no_faults(words: dict[str, Any]) -> None:
    findings = check_machine(replace(SOUND, **words))
    assert faults(findings) == []
    assert not has_error(findings)


def test_fault_must_have_a_remedy() -> None:
    with refused(InvalidValue):
        Finding(machine="ada", what="disk", severity="error", sentence="is full")
