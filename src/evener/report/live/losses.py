"""Seconds that a run loses to waiting, by who is waited for and why, and what may help.

    a step:  seconds = busy of the slowest node + exchange
    waiting of all nodes, on average = (busy of the slowest - mean busy) + exchange
                                        the slowest node's doing         nobody's

The one who arrives last is waited for; the one who waits is not to blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from evener.history import Entry, NodeWork
from evener.report.text import percent
from evener.schema import Part

Cause = Literal["computing", "loading", "exchange"]
_MUCH = 0.1


class Loss(Part, frozen=True, kw_only=True):
    """Seconds of a run that were lost to one cause.

    Attributes:
        node: that was waited for; empty where all waited for what they exchange.
        cause: why.
        seconds: all in all.
        fraction: of the run's.
    """

    node: str
    cause: Cause
    seconds: float
    fraction: float


def slowest(nodes: dict[str, NodeWork]) -> str:
    """Whom the others wait for; empty if nobody has worked."""
    busiest = max(nodes, key=lambda name: nodes[name].busy_seconds, default="")
    return busiest if busiest and nodes[busiest].busy_seconds > 0 else ""


class Losses:
    """What has been lost since the run began."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, Cause], float] = defaultdict(float)
        self._total = 0.0

    def add(self, entry: Entry) -> None:
        """Some steps more."""
        nodes = {name: work for name, work in entry.nodes.items() if work.busy_seconds > 0}
        if not (name := slowest(nodes)):
            return
        last = nodes[name]
        mean = sum(work.busy_seconds for work in nodes.values()) / len(nodes)
        self._total += entry.seconds
        self._seconds[name, _cause(last, list(nodes.values()))] += last.busy_seconds - mean
        if len(nodes) > 1:
            self._seconds["", "exchange"] += max(0.0, entry.seconds - last.busy_seconds)

    def largest(self, most: int = 6) -> list[Loss]:
        """What was lost to each cause, the largest first."""
        return [
            Loss(node=node, cause=cause, seconds=seconds, fraction=seconds / self._total)
            for (node, cause), seconds in sorted(self._seconds.items(), key=lambda item: -item[1])[:most]
            if seconds > 0
        ]

    def advice(self) -> str:
        """What may help most, in a sentence."""
        loss = next(iter(self.largest(1)), None)
        if loss is None or loss.fraction < _MUCH:
            return "Hardly any time is lost to waiting."
        return _ADVICE[loss.cause].format(node=loss.node, part=percent(loss.fraction))


def _cause(last: NodeWork, nodes: Sequence[NodeWork]) -> Cause:
    """Whether the last one has more to load than the others, or more to compute."""
    loads = last.io_seconds - sum(work.io_seconds for work in nodes) / len(nodes)
    computes = last.compute_seconds - sum(work.compute_seconds for work in nodes) / len(nodes)
    return "loading" if loads > computes else "computing"


_ADVICE: dict[Cause, str] = {
    "computing": "{part} of the time the others wait for {node} to compute: see what else runs there; "
    "--shares measured gives it less.",
    "loading": "{part} of the time the others wait for {node} to load its samples: --workers 2 loads them ahead.",
    "exchange": "{part} of the time all nodes exchange and none computes: a larger --batch-size exchanges less often, "
    "and so does --agreement average --local-steps 8.",
}
