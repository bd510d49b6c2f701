"""Reads what else this machine does: busy cores, who keeps them busy, what its host takes, and heat."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from evener.doctor.facts import LoadFacts
from evener.records.schema import shown
from evener.system.cores import cpu_quota, usable_cores

_SECONDS = 0.5
_LEAST_CORES = 0.05
"""A process that takes less is not named."""
_PROCESSORS = Path("/sys/devices/system/cpu")


def load_facts(seconds: float = _SECONDS, processors: Path = _PROCESSORS) -> LoadFacts:
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
