"""Whether others wanted the processor while something was measured; then it was measured wrongly, and that is said.

Linux counts for every thread how long it ran, and how long it was ready to run while another one had its core
(`/proc/thread-self/schedstat`, of which the first two numbers are these, in nanoseconds). Idling on purpose is neither,
so slowed nodes are judged like others. Nodes of this machine that share a core wait for each other as well: as long as
the others of that core ran at most, which is not counted. A CPU quota stops a thread, too: that is nobody else's doing,
so it is not counted either, and the quota is named instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.records.schema import Finite, Part
from evener.system.cores import cpu_quota, throttled_seconds

MOST = 0.1
"""Share of the wanted time that others may take before it is said."""
_LEAST_SECONDS = 0.01
_COUNTS = Path("/proc/thread-self/schedstat")


class ProcessorTime(Part, frozen=True, kw_only=True):
    """What a thread had of the processor.

    Attributes:
        node: that it belongs to.
        cores: that it may run on; empty for all.
        ran: seconds.
        waited: seconds in which it was ready to run, and another one ran.
        quota: cores' worth of time that a control group allows it; None if it allows all cores.
    """

    node: str
    cores: tuple[int, ...] = ()
    ran: Finite
    waited: Finite
    quota: Finite | None = None


class ProcessorWatch:
    """Counts from now on what the calling thread has of the processor.

    Args:
        node: that it belongs to.
        cores: that it may run on; empty for all.
        counts: the file that says so; where it is not there, nobody ever waits.
    """

    def __init__(self, node: str, cores: Sequence[int] = (), counts: Path = _COUNTS) -> None:
        self._node, self._cores, self._counts = node, tuple(cores), counts
        self._begin, self._throttled = self._read(), throttled_seconds()

    def stop(self) -> ProcessorTime:
        """What it had until now."""
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
    """By node, the share of the processor time it wanted that others had, who are none of these; at least 0."""
    found = {}
    for own in times:
        beside = sum(one.ran for one in times if one is not own and set(one.cores) & set(own.cores))
        lost = max(0.0, own.waited - beside)
        found[own.node] = lost / (own.ran + lost) if own.ran + own.waited > _LEAST_SECONDS else 0.0
    return found


def quota_sentence(times: Sequence[ProcessorTime]) -> str:
    """Which nodes a CPU quota limits, and to what; empty if there are none."""
    limited = [f"{own.quota:.3g} cores on {own.node}" for own in times if own.quota is not None]
    if not limited:
        return ""
    return f"a container or a control group allows {', '.join(limited)}; speeds are measured within that"


def busy_sentence(shares: Mapping[str, float]) -> str:
    """What to say of nodes on which others took much of the time; empty if there are none."""
    busy = [f"{share:.0%} on {node}" for node, share in shares.items() if share > MOST]
    if not busy:
        return ""
    return (
        f"other processes took {', '.join(busy)} of the processor time that measuring wanted: these times, and shares "
        "made of them, may be wrong; measure again when the machine is idle"
    )
