"""Detects whether other processes used the processor during a measurement, which then is unreliable.

Linux counts for every thread how long it ran, and how long it was ready while another thread had its core
(`/proc/thread-self/schedstat`, first two numbers, in nanoseconds). Deliberate idling is neither, so slowed nodes are
judged like others. Nodes of this machine that share a core also wait for each other, at most as long as the other nodes
ran; that time is not counted. A CPU quota also stops a thread. It is not counted as the work of other processes; the
quota is reported instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.records.schema import Finite, Part
from evener.system.cores import cpu_quota, throttled_seconds

MAX_TAKEN_SHARE = 0.1
"""Share of the wanted time that other processes may take before a warning."""
_MIN_WANTED_SECONDS = 0.01
_COUNTS = Path("/proc/thread-self/schedstat")


class ProcessorTime(Part, frozen=True, kw_only=True):
    """Processor time of a thread.

    Attributes:
        node: node that the thread belongs to.
        cores: cores that it may run on; empty for all.
        ran: seconds in which it ran.
        waited: seconds in which it was ready to run while another thread ran.
        quota: number of cores that a control group allows; None for no limit.
    """

    node: str
    cores: tuple[int, ...] = ()
    ran: Finite
    waited: Finite
    quota: Finite | None = None


class ProcessorWatch:
    """Counts the processor time of the calling thread from now on.

    Args:
        node: node that the thread belongs to.
        cores: cores that it may run on; empty for all.
        counts: file with the kernel's counts; where it does not exist, no waiting is counted.
    """

    def __init__(self, node: str, cores: Sequence[int] = (), counts: Path = _COUNTS) -> None:
        self._node, self._cores, self._counts = node, tuple(cores), counts
        self._begin, self._throttled = self._read(), throttled_seconds()

    def stop(self) -> ProcessorTime:
        """Return the processor time until now."""
        ran, waited = (now - before for now, before in zip(self._read(), self._begin, strict=True))
        waited = max(0.0, waited - (throttled_seconds() - self._throttled))
        return ProcessorTime(node=self._node, cores=self._cores, ran=ran, waited=waited, quota=cpu_quota())

    def _read(self) -> tuple[float, float]:
        try:
            ran, waited, *_ = self._counts.read_text().split()
        except (OSError, ValueError):  # not Linux, or a kernel that does not count
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9


def taken_by_others(times: Sequence[ProcessorTime]) -> dict[str, float]:
    """Return, by node, the share of the wanted processor time that other processes took; at least 0."""
    shares = {}
    for time in times:
        beside = sum(other.ran for other in times if other is not time and set(other.cores) & set(time.cores))
        lost = max(0.0, time.waited - beside)
        shares[time.node] = lost / (time.ran + lost) if time.ran + time.waited > _MIN_WANTED_SECONDS else 0.0
    return shares


def quota_sentence(times: Sequence[ProcessorTime]) -> str:
    """Return a sentence about nodes with a CPU quota; empty if there are none."""
    limited = [f"{time.quota:.3g} cores on {time.node}" for time in times if time.quota is not None]
    if not limited:
        return ""
    return f"a container or a control group allows {', '.join(limited)}; speeds are measured within that limit"


def busy_sentence(shares: Mapping[str, float]) -> str:
    """Return a warning about nodes on which other processes took much of the time; empty if there are none."""
    busy = [f"{share:.0%} of the CPU time on {node}" for node, share in shares.items() if share > MAX_TAKEN_SHARE]
    if not busy:
        return ""
    return (
        f"other processes took {', '.join(busy)} during the measurement; these times, and shares "
        "computed from them, may be wrong: measure again when the machine is idle"
    )
