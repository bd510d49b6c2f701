"""The cores that this process may use: its affinity, or fewer where a control group limits its CPU time.

A container of one core on a machine of 64 sees all of them. Sixty-four threads in it would mostly wait for each other,
so computations use only the allowed number of threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from typing import Any

from evener.system.control_groups import ControlGroup, groups_of

_before: set[int] = set()
"""Cores of this process before `bind_to`."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    return max(1, min([_bound_cores(), *map(ceil, _quotas())]))


def cpu_quota() -> float | None:
    """Return the CPU time in cores that control groups allow, such as 0.33; None if they allow all cores."""
    quota = min(_quotas(), default=inf)
    return quota if quota < _bound_cores() else None


def quota_speed(processes: int = 1) -> float:
    """Return the speed at which each of `processes` computes without being stopped by a CPU quota; 1.0 without one.

    The kernel stops a process for the rest of a period (usually 100 ms) once the quota is used up. Steps are shorter
    than a period, so most of them look fast and a few stall. A process that throttles itself takes the same time for
    every step, so its measurements are sustainable.
    """
    quota, named = cpu_quota(), os.environ.get("OMP_NUM_THREADS", "")
    if quota is None:
        return 1.0
    threads = min(int(named), _bound_cores()) if named.isdecimal() and int(named) else usable_cores()
    return min(1.0, quota / (threads * processes))


def throttled_seconds() -> float:
    """Return the seconds for which a CPU quota has stopped the groups of this process since they were made."""
    return max((_throttled_seconds(group) for group in groups_of("cpu")), default=0.0)


def compute_in(threads: int) -> None:
    """Let NumPy and PyTorch use `threads` threads: on a single core, more of them would wait for each other."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are loaded later
    _threadpoolctl().threadpool_limits(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


@contextmanager
def undivided_products() -> Iterator[int]:
    """Let NumPy compute each matrix product in one thread inside the block.

    Yields:
        The number of threads that share a product outside the block; 1 if `threadpoolctl` does not know the library,
        whose threads it cannot limit.
    """
    pools = _threadpoolctl()
    of_products = [pool["num_threads"] for pool in pools.threadpool_info() if pool["user_api"] == "blas"]
    with pools.threadpool_limits(1, user_api="blas"):
        yield max(of_products, default=1)


def _threadpoolctl() -> Any:
    """Import and return `threadpoolctl`, and remove the variable that its import puts into the environment."""
    before = os.environ.get(_DUPLICATES)
    import threadpoolctl

    if before is None:
        os.environ.pop(_DUPLICATES, None)
    return threadpoolctl


_DUPLICATES = "KMP_DUPLICATE_LIB_OK"


def bind_to(cores: Iterable[int]) -> None:
    """Let this process compute on `cores` only, where the system supports that."""
    if hasattr(os, "sched_setaffinity"):
        _before.update(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores)


def unbind() -> None:
    """Let this process compute on all cores that it had before `bind_to`."""
    if _before:
        os.sched_setaffinity(0, _before)


def keep_to_quota() -> None:
    """Let NumPy and PyTorch use as many threads as a control group allows, unless the user set a number."""
    if usable_cores() < _bound_cores() and "OMP_NUM_THREADS" not in os.environ:
        compute_in(usable_cores())


def _bound_cores() -> int:
    """Return the cores of this process's affinity, or all where the system does not know it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> list[float]:
    """Return the CPU time in cores that each group of this process allows; empty without limits."""
    return [quota for group in groups_of("cpu") if (quota := _quota(group)) is not None]


def _quota(group: ControlGroup) -> float | None:
    if group.version == 2:
        values = group.read("cpu.max").split()
    else:
        values = [group.read(f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
    is_bound = len(values) == 2 and all(value.isdecimal() for value in values)  # `max` and -1 mean no bound
    return int(values[0]) / int(values[1]) if is_bound and int(values[1]) else None


def _throttled_seconds(group: ControlGroup) -> float:
    counts = dict(fields for line in group.read("cpu.stat").splitlines() if len(fields := line.split()) == 2)
    nanoseconds = counts.get("throttled_time", "0") if group.version == 1 else counts.get("throttled_usec", "0") + "000"
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0
