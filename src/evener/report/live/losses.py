"""Seconds that a run loses to waiting, by who is waited for and why, and what may help.

    a step:  seconds = busy of the slowest node + exchange
    waiting of all nodes, on average = (busy of the slowest - mean busy) + exchange
                                        the slowest node's doing         nobody's

The one who arrives last is waited for; the one who waits is not to blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from evener.records.history import Entry, NodeWork
from evener.records.schema import Part
from evener.report.text import percent

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

    def advice(self, options: Mapping[str, str], *, divides_samples: bool) -> str:
        """What may help most, in a sentence.

        Args:
            options: of the run, as of a `TrainRecord`; what is not known is not advised.
            divides_samples: whether each node has the whole model, and a part of the samples.
        """
        loss = next(iter(self.largest(1)), None)
        if loss is None or loss.fraction < _MUCH:
            return "Hardly any time is lost to waiting."
        part = percent(loss.fraction)
        if loss.cause == "exchange":
            return f"{part} of the time all nodes exchange and none computes: {_against_exchanges(options)}."
        if loss.cause == "loading":
            cure = _against_loading(options)
            return f"{part} of the time the others wait for {loss.node} to load its samples: {cure}."
        cure = _against_computing(options) if divides_samples else ""
        return f"{part} of the time the others wait for {loss.node} to compute: see what else runs there{cure}."


def _against_computing(options: Mapping[str, str]) -> str:
    """What gives a slow node fewer samples, if the run does not do so already."""
    if options.get("--shares", "measured") != "measured" and not options.get("--agreement"):
        return "; --shares measured gives it less"
    return "; without --stationary it would be given less" if options.get("--stationary") else ""


def _against_loading(options: Mapping[str, str]) -> str:
    workers = options.get("--workers", options.get("workers", ""))
    more = str(2 * int(workers) or 2) if workers.isdecimal() else ""
    if not more:
        return "more workers of its DataLoader load them ahead"
    return f"--workers {more} loads them ahead" if "--workers" in options else f"workers={more} loads them ahead"


def _against_exchanges(options: Mapping[str, str]) -> str:
    batch = next((name for name in ("--batch-size", "batch") if name in options), "")
    now = f" (now {options[batch]})" if batch and options[batch] else ""
    larger = f"a larger {'batch=' if batch == 'batch' else batch or 'batch'}{now} exchanges less often"
    if options.get("--agreement") in LOCAL_AGREEMENTS:
        return f"{larger}, and so do more --local-steps"
    return f"{larger}, and so does --agreement average --local-steps 8" if "--agreement" in options else larger


LOCAL_AGREEMENTS = ("average", "diloco", "federated")
"""Agreements in which nodes make steps of their own between two exchanges."""


def _cause(last: NodeWork, nodes: Sequence[NodeWork]) -> Cause:
    """Whether the last one has more to load than the others, or more to compute."""
    loads = last.io_seconds - sum(work.io_seconds for work in nodes) / len(nodes)
    computes = last.compute_seconds - sum(work.compute_seconds for work in nodes) / len(nodes)
    return "loading" if loads > computes else "computing"
