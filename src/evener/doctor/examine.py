"""Reads this machine: everything that is not read by a file of its own, and all of it together."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import psutil

from evener.doctor.facts import FolderFacts, GpuFacts, LoadFacts, MachineFacts
from evener.doctor.network import network_facts
from evener.records import version
from evener.records.schema import shown
from evener.system.cores import cpu_quota, usable_cores
from evener.system.host import cpu_model, version_of
from evener.system.memory import usable_memory


def examine(
    folders: Mapping[str, Path], *, machine: str = "", towards: str | None = None, task_problem: str | None = None
) -> MachineFacts:
    """Return the facts of this machine; takes a second, and up to 10 where a driver or the name service hangs.

    Args:
        folders: that runs write into, by what lies there.
        machine: what it is called; its own name by default.
        towards: a host that it is to reach; None for any other.
        task_problem: why the task cannot be loaded here; empty if it can, None if there is none.
    """
    host = socket.gethostname()
    gpus, gpu_problem = driver_gpus()
    load = load_facts()  # before PyTorch may be imported
    total, free = usable_memory()
    return MachineFacts(
        machine=machine or host,
        evener=version.VERSION,
        python=platform.python_version(),
        torch=version_of("torch"),
        processor=cpu_model(),
        clock=time.time(),
        installed=Path(version.__file__).stat().st_mtime,
        total_bytes=total,
        free_bytes=free,
        machine_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        visible_gpus=visible_gpus(len(gpus), os.environ.get("CUDA_VISIBLE_DEVICES")),
        gpu_problem=shown(gpu_problem),
        torch_gpus=torch_gpus(len(gpus)),
        folders=tuple(folder_facts(purpose, path) for purpose, path in folders.items()),
        network=network_facts(os.environ, host, towards),
        load=load,
        task_problem=task_problem,
    )


def folder_facts(purpose: str, path: Path) -> FolderFacts:
    """The room in a folder, or where it would be made."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    inodes = os.statvfs(there) if hasattr(os, "statvfs") else None  # Windows's file systems have no such limit
    return FolderFacts(
        purpose=purpose,
        path=shown(str(there)),
        free_bytes=shutil.disk_usage(there).free,
        has_inodes=inodes is None or inodes.f_favail > 0 or inodes.f_files == 0,
        is_writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    )


_COMMAND = "nvidia-smi"
_SECONDS = 6.0
_FIELDS = (
    "name", "driver_version", "memory.total", "memory.free",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip
_OTHER_DRIVER = Path("/dev/kfd")
"""Device file of AMD's driver, whose GPUs PyTorch shows in the same way."""


def driver_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs of NVIDIA's driver, and why none although its tool is installed; empty without the tool."""
    command = shutil.which(_COMMAND)
    if command is None:
        return (), ""
    query = [command, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{_COMMAND} does not answer: {error}"
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return (), f"{_COMMAND} fails: {lines[0] if lines else f'exit code {done.returncode}'}"
    return tuple(_gpu_of(line) for line in done.stdout.splitlines() if line.strip()), ""


def torch_gpus(shown: int) -> int | None:
    """GPUs that PyTorch can use; None if no driver is here, or no PyTorch, so that it has not to be asked."""
    if not (shown or _OTHER_DRIVER.exists()) or not version_of("torch"):
        return None
    from evener.system import accelerators

    return len(accelerators.names())


def visible_gpus(shown: int, chosen: str | None) -> int:
    """Return how many of the GPUs $CUDA_VISIBLE_DEVICES leaves to this process: those before the first invalid one."""
    if chosen is None:
        return shown
    ids = [one.strip() for one in chosen.split(",")]
    return min(shown, len(list(takewhile(lambda one: one and not one.startswith("-"), ids))))


def _gpu_of(line: str) -> GpuFacts:
    """Return the GPU of a line of the tool; missing numbers are 0."""
    values = [value.strip() for value in line.split(",")]
    name, driver, total, free, *slowed = [*values, *[""] * (len(_FIELDS) - len(values))]
    return GpuFacts(
        name=name,
        driver=driver,
        total_bytes=_mebibytes(total),
        free_bytes=_mebibytes(free),
        is_hot="Active" in slowed,
    )


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0


_LOAD_SECONDS = 0.5
_LEAST_CORES = 0.05
"""A process that takes less is not named."""
_PROCESSORS = Path("/sys/devices/system/cpu")


def load_facts(seconds: float = _LOAD_SECONDS, processors: Path = _PROCESSORS) -> LoadFacts:
    """Measure the load of this machine for `seconds`, during which this process sleeps.

    Args:
        seconds: to look at it.
        processors: folder in which the kernel counts how often each core was slowed down for heat.
    """
    began, before, hot = time.monotonic(), _processor_seconds(), _throttled(processors)
    stolen = _stolen_seconds()
    percents = psutil.cpu_percent(interval=seconds, percpu=True)
    took = time.monotonic() - began
    stolen = _stolen_seconds() - stolen
    name, cores = _busiest(before, _processor_seconds(), took)
    bound = _bound_cores(len(percents))
    usable = min(len(bound), usable_cores())
    spared = len(bound) - usable  # by a control group that allows less: what others do there costs nothing
    return LoadFacts(
        cores=usable,
        busy_cores=max(0.0, sum(percents[core] for core in bound) / 100 - spared),
        busiest=name,
        busiest_cores=cores,
        stolen=min(1.0, max(0.0, stolen / took / len(percents))),
        hot_cores=sum(after > hot.get(core, after) for core, after in _throttled(processors).items()),
        quota=cpu_quota(),
    )


def _bound_cores(count: int) -> list[int]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    return [core for core in allowed if core < count]


def _processor_seconds() -> dict[psutil.Process, float]:
    """Return the processor seconds of every process but this one."""
    seconds = {}
    for process in psutil.process_iter(["cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            seconds[process] = times.user + times.system
    return seconds


def _busiest(
    before: dict[psutil.Process, float], after: dict[psutil.Process, float], seconds: float
) -> tuple[str, float]:
    """Name and cores of the process that took most; ("", 0) if none took much."""
    taken = {process: (spent - before.get(process, 0.0)) / seconds for process, spent in after.items()}
    process = max(taken, key=taken.__getitem__, default=None)
    if process is None or taken[process] < _LEAST_CORES:
        return "", 0.0
    try:
        name = process.name()
    except psutil.Error:
        name = "a process that has ended"
    return shown(f"{name} (pid {process.pid})")[:256], taken[process]


def _stolen_seconds() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def _throttled(processors: Path) -> dict[str, int]:
    """How often each core was slowed down for heat, where the kernel counts it."""
    counts = processors.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    return {file.parts[-3]: int(file.read_text()) for file in counts}
