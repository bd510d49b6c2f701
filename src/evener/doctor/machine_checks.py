"""Checks of one machine: a table of pure functions, from its facts to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from evener.doctor.facts import FolderFacts, GpuFacts, MachineFacts
from evener.doctor.finding import Finding, Severity, found
from evener.doctor.interface_checks import check_address, check_mtu, check_name

_GB, _MB = 10**9, 10**6
LEAST_MEMORY, LITTLE_MEMORY = 200 * _MB, 1 * _GB
"""Free bytes below which no run starts, and below which few do."""
LEAST_ROOM, LITTLE_ROOM = 100 * _MB, 2 * _GB
"""Free bytes on a disk, in the same way: a checkpoint and its successor are there at the same time."""
LITTLE_SHARED = 250 * _MB
"""Of shared memory: containers have 64 MB where nothing is said, and data loaders pass their batches through it."""
SHARED = "shared memory"
BUSY_CORES, BUSY_SHARE = 0.7, 0.05
"""Cores, and share of all, that others have to take before it counts."""
_STOLEN = 0.1
_TAKEN = 0.5
"""Of a GPU's memory."""
_SLACK_SECONDS = 86400.0
"""A clock that shows an earlier day than Evener's files has never been set."""

Check = Callable[[MachineFacts], Iterator[Finding]]


def check_machine(facts: MachineFacts) -> list[Finding]:
    """All that the table finds of a machine, in its order."""
    return [finding for check in CHECKS.values() for finding in check(facts)]


def _check_versions(facts: MachineFacts) -> Iterator[Finding]:
    torch = f"PyTorch {facts.torch}" if facts.torch else "no PyTorch, so thin tasks alone"
    yield found(facts.machine, "versions", "ok", f"Evener {facts.evener}, Python {facts.python}, {torch}")


def _check_devices(facts: MachineFacts) -> Iterator[Finding]:
    if facts.gpu_problem:
        yield found(
            facts.machine, "GPU", "error", facts.gpu_problem,
            "reinstall NVIDIA's driver and restart the machine; in a container, start it with --gpus all",
        )  # fmt: skip
    usable, shown = facts.torch_gpus, facts.visible_gpus
    if usable is not None and usable < shown:
        yield found(
            facts.machine, "GPU", "error",
            f"PyTorch {facts.torch} can use {usable} of {shown} GPUs that the driver shows",
            "install a build of PyTorch for CUDA that the driver is new enough for (pytorch.org/get-started)",
        )  # fmt: skip
    for number, gpu in enumerate(facts.gpus):
        yield _check_gpu(facts, number, gpu)
    if not facts.gpus and not facts.gpu_problem:
        others = f"{usable} GPUs, and " if usable else "no NVIDIA GPU; "
        yield found(facts.machine, "device", "ok", f"{others}{_processor(facts)}")


def _processor(facts: MachineFacts) -> str:
    """The processor, with the cores or the CPU quota that this process may use."""
    load = facts.load
    if load.quota is not None:
        return f"{facts.processor} with a CPU quota of {load.quota:.3g} cores (of a container or a control group)"
    return f"{'1 core' if load.cores == 1 else f'{load.cores} cores'} of {facts.processor}"


def _check_gpu(facts: MachineFacts, number: int, gpu: GpuFacts) -> Finding:
    if gpu.is_hot:
        return found(
            facts.machine, "heat", "warning", f"GPU {number} ({gpu.name}) slows down because it is hot",
            "clean its fans, or lower its power limit with `nvidia-smi -pl`",
        )  # fmt: skip
    if gpu.free_bytes < (1 - _TAKEN) * gpu.total_bytes:
        return found(
            facts.machine, "GPU", "warning",
            f"GPU {number} ({gpu.name}) has {_size(gpu.free_bytes)} of {_size(gpu.total_bytes)} free",
            "see who holds the rest with `nvidia-smi`",
        )  # fmt: skip
    return found(facts.machine, "GPU", "ok", f"GPU {number}: {gpu.name}, {_size(gpu.total_bytes)}, driver {gpu.driver}")


def _check_memory(facts: MachineFacts) -> Iterator[Finding]:
    is_limited = facts.total_bytes < facts.machine_bytes
    limit = " that a control group allows" if is_limited else ""
    severity: Severity = "ok" if facts.free_bytes >= LITTLE_MEMORY else "warning"
    severity = "error" if facts.free_bytes < LEAST_MEMORY else severity
    cure = "end other programs" + (", or raise the container's or the job's limit" if is_limited else "")
    yield found(
        facts.machine, "memory", severity, f"{_size(facts.free_bytes)} of {_size(facts.total_bytes)}{limit} are free",
        "" if severity == "ok" else cure,
    )  # fmt: skip


def _check_folders(facts: MachineFacts) -> Iterator[Finding]:
    for folder in facts.folders:
        yield _check_folder(facts, folder)


def _check_folder(facts: MachineFacts, folder: FolderFacts) -> Finding:
    place, room = f"{folder.path} ({folder.purpose})", _size(folder.free_bytes)
    if not folder.is_writable:
        return found(
            facts.machine,
            "disk",
            "error",
            f"{place} cannot be written into",
            "change its owner, or name another folder",
        )
    if folder.purpose == SHARED:
        if folder.free_bytes < LITTLE_SHARED:
            return found(
                facts.machine, "disk", "warning", f"{place} has {room} free, and data loaders pass batches through it",
                "start the container with --shm-size=1g, or train without --workers",
            )  # fmt: skip
    elif folder.free_bytes < LITTLE_ROOM or not folder.has_inodes:
        is_full = folder.free_bytes < LEAST_ROOM or not folder.has_inodes
        sentence = f"{place} has {room} free" if folder.has_inodes else f"{place} takes no further files"
        return found(
            facts.machine,
            "disk",
            "error" if is_full else "warning",
            sentence,
            "remove files there, or name another folder",
        )
    return found(facts.machine, "disk", "ok", f"{place} has {room} free")


def _check_load(facts: MachineFacts) -> Iterator[Finding]:
    load = facts.load
    if load.busy_cores >= max(BUSY_CORES, BUSY_SHARE * load.cores):
        by = f", {load.busiest_cores:.1f} of it by {load.busiest}" if load.busiest else ""
        yield found(
            facts.machine, "load", "warning", f"others keep {load.busy_cores:.1f} of {load.cores} cores busy{by}",
            "end them, or expect that this machine is given less of the work",
        )  # fmt: skip
    elif load.stolen < _STOLEN:
        yield found(facts.machine, "load", "ok", f"others keep {load.busy_cores:.1f} of {load.cores} cores busy")
    if load.stolen >= _STOLEN:
        yield found(
            facts.machine, "load", "warning",
            f"the host of this virtual machine gives {load.stolen:.0%} of its time to others",
            "move it to another host, or ask for processors of its own",
        )  # fmt: skip
    if load.hot_cores:
        yield found(
            facts.machine, "heat", "warning", f"{load.hot_cores} cores were slowed down just now because they are hot",
            "clean the fans, and let air to the machine",
        )  # fmt: skip


def _check_clock(facts: MachineFacts) -> Iterator[Finding]:
    shown = f"{datetime.fromtimestamp(facts.clock, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if facts.clock < facts.installed - _SLACK_SECONDS:
        yield found(
            facts.machine, "clock", "error", f"the clock shows {shown}, which is before Evener's files were written",
            "let it follow NTP: `timedatectl set-ntp true`",
        )  # fmt: skip
    else:
        yield found(facts.machine, "clock", "ok", shown)


def _check_task(facts: MachineFacts) -> Iterator[Finding]:
    if facts.task_problem:
        yield found(
            facts.machine, "task", "error", facts.task_problem, "install there what it imports, and put its data there"
        )
    elif facts.task_problem is not None:
        yield found(facts.machine, "task", "ok", "the task can be loaded, and its data are there")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GB:.1f} GB" if nbytes >= _GB else f"{nbytes / _MB:.0f} MB"


CHECKS: Mapping[str, Check] = {
    "versions": _check_versions,
    "devices": _check_devices,
    "memory": _check_memory,
    "disk": _check_folders,
    "name": check_name,
    "address": check_address,
    "MTU": check_mtu,
    "load": _check_load,
    "clock": _check_clock,
    "task": _check_task,
}
"""By what is looked at."""
