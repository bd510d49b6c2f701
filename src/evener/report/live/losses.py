"""Seconds that a run loses to waiting, by the node that the others wait for and the cause, and what may help.

    a step:  seconds = busy of the slowest node + exchange
    waiting of all nodes, on average = (busy of the slowest - mean busy) + exchange
                                        caused by the slowest node       caused by no node

The node that arrives last causes the wait; the nodes that wait do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from evener.records.agreement import agreement_facts
from evener.records.history import Entry, NodeWork
from evener.records.schema import Part
from evener.report.text import percent

Cause = Literal["computing", "loading", "exchange"]
_MIN_ADVISED_FRACTION = 0.1


class Loss(Part, frozen=True, kw_only=True):
    """Seconds of a run that were lost to one cause.

    Attributes:
        node: node that the others waited for; empty if all waited for an exchange.
        cause: why they waited.
        seconds: seconds lost since the run began.
        fraction: fraction of the run's seconds.
    """

    node: str
    cause: Cause
    seconds: float
    fraction: float


def slowest(nodes: dict[str, NodeWork]) -> str:
    """Return the name of the node that the others wait for; empty if no node has worked."""
    busiest = max(nodes, key=lambda name: nodes[name].busy_seconds, default="")
    return busiest if busiest and nodes[busiest].busy_seconds > 0 else ""


class Losses:
    """Sums the seconds lost since the run began, by node and cause."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, Cause], float] = defaultdict(float)
        self._total = 0.0

    def add(self, entry: Entry) -> None:
        """Add the steps of `entry`."""
        nodes = {name: work for name, work in entry.nodes.items() if work.busy_seconds > 0}
        if not (name := slowest(nodes)):
            return
        last = nodes[name]
        mean = sum(work.busy_seconds for work in nodes.values()) / len(nodes)
        self._total += entry.seconds
        self._seconds[name, _cause(last, list(nodes.values()))] += last.busy_seconds - mean
        if len(nodes) > 1:
            self._seconds["", "exchange"] += max(0.0, entry.seconds - last.busy_seconds)

    def largest(self, limit: int = 6) -> list[Loss]:
        """Return at most `limit` losses, the largest first."""
        return [
            Loss(node=node, cause=cause, seconds=seconds, fraction=seconds / self._total if self._total else 0.0)
            for (node, cause), seconds in sorted(self._seconds.items(), key=lambda item: -item[1])[:limit]
            if seconds > 0
        ]

    def advice(self, options: Mapping[str, str], *, divides_samples: bool) -> str:
        """Return one sentence on the measure that helps most.

        Args:
            options: options of the run, as in a `TrainRecord`; unknown options get no advice.
            divides_samples: whether each node holds the whole model and gets a part of the samples.
        """
        loss = next(iter(self.largest(1)), None)
        if loss is None or loss.fraction < _MIN_ADVISED_FRACTION:
            return "Hardly any time is lost to waiting."
        lost_percent = percent(loss.fraction)
        if loss.cause == "exchange":
            return f"{lost_percent} of the time all nodes exchange and none computes: {_against_exchanges(options)}."
        if loss.cause == "loading":
            remedy = _against_loading(options)
            return f"{lost_percent} of the time the others wait for {loss.node} to load its samples: {remedy}."
        remedy = _against_computing(options) if divides_samples else ""
        return (
            f"{lost_percent} of the time the others wait for {loss.node} to compute: see what else runs there{remedy}."
        )


def _against_computing(options: Mapping[str, str]) -> str:
    """Return advice that gives a slow node fewer samples, if the run does not already do so."""
    if options.get("--shares", "measured") != "measured" and not options.get("--agreement"):
        return "; --shares measured gives it fewer samples"
    return "; without --stationary it would get fewer samples" if options.get("--stationary") else ""


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
    facts = agreement_facts(options.get("--agreement", ""))
    if facts is not None and facts.takes_local_steps and "--stationary" not in options:
        return f"{larger}, and so do more --local-steps"
    if facts is not None and facts.sends != "gradients":
        return larger
    return f"{larger}, and so does --agreement average --local-steps 8" if "--agreement" in options else larger


def _cause(last: NodeWork, nodes: Sequence[NodeWork]) -> Cause:
    """Return whether the last node exceeds the mean more in loading or in computing."""
    loads = last.io_seconds - sum(work.io_seconds for work in nodes) / len(nodes)
    computes = last.compute_seconds - sum(work.compute_seconds for work in nodes) / len(nodes)
    return "loading" if loads > computes else "computing"
