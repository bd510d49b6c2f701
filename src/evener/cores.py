"""How many cores this process may use: those that it is bound to, or fewer where a control group allows it less time.

A container of one core on a machine of 64 sees all of them. Sixty-four threads in it wait for each other for most of
the time that they are given, so whoever computes there keeps to what is allowed.
"""

from __future__ import annotations

import os
import sys
from math import ceil

from evener.control_groups import ControlGroup, groups_of


def usable_cores() -> int:
    """That this process may use, at least 1."""
    return max(1, min([_bound_cores(), *map(ceil, _quotas())]))


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
