"""How many cores this process may use: those that it is bound to, or fewer where a control group allows it less time.

A container of one core on a machine of 64 sees all of them. Sixty-four threads in it wait for each other for most of
the time that they are given, so whoever computes there keeps to what is allowed.
"""

from __future__ import annotations

import os
import sys
from math import ceil, inf

from evener.system.control_groups import ControlGroup, groups_of


def usable_cores() -> int:
    """That this process may use, at least 1."""
    return max(1, min([_bound_cores(), *map(ceil, _quotas())]))


def cpu_quota() -> float | None:
    """Cores' worth of time that control groups allow this process, such as 0.33; None if they allow all its cores."""
    quota = min(_quotas(), default=inf)
    return quota if quota < _bound_cores() else None


def quota_speed(processes: int = 1) -> float:
    """The speed at which each of `processes` computes without being stopped by a CPU quota; 1.0 where there is none.

    The kernel stops a process for the rest of a period (usually 100 ms) once the quota is used up. Steps are shorter
    than a period, so most of them look fast and a few stall. A process that paces itself takes the same time for every
    step, and what it measures is what it can keep up.
    """
    quota, named = cpu_quota(), os.environ.get("OMP_NUM_THREADS", "")
    if quota is None:
        return 1.0
    threads = min(int(named), _bound_cores()) if named.isdecimal() and int(named) else usable_cores()
    return min(1.0, quota / (threads * processes))


def throttled_seconds() -> float:
    """Seconds for which a CPU quota has stopped the processes of this process's groups since these were made."""
    return max((_throttled_seconds(group) for group in groups_of("cpu")), default=0.0)


def compute_in(threads: int) -> None:
    """Have NumPy and PyTorch compute in so many: on a core of the node's own, more of them wait for each other."""
    from threadpoolctl import threadpool_limits  # here, for it changes the environment when it is imported

    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what is loaded later
    threadpool_limits(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def keep_to_quota() -> None:
    """Have NumPy and PyTorch compute in as many threads as a control group allows, unless the user named a number."""
    if usable_cores() < _bound_cores() and "OMP_NUM_THREADS" not in os.environ:
        compute_in(usable_cores())


def _bound_cores() -> int:
    """Not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> list[float]:
    """Cores' time that the groups of this process allow it; empty where none bounds it."""
    return [quota for group in groups_of("cpu") if (quota := _quota(group)) is not None]


def _quota(group: ControlGroup) -> float | None:
    if group.version == 2:
        words = group.read("cpu.max").split()
    else:
        words = [group.read(f"cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
    is_bound = len(words) == 2 and all(word.isdecimal() for word in words)  # `max` and -1 stand for no bound
    return int(words[0]) / int(words[1]) if is_bound and int(words[1]) else None


def _throttled_seconds(group: ControlGroup) -> float:
    counts = dict(words for line in group.read("cpu.stat").splitlines() if len(words := line.split()) == 2)
    nanoseconds = counts.get("throttled_time", "0") if group.version == 1 else counts.get("throttled_usec", "0") + "000"
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0
