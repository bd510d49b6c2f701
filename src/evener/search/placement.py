"""Which node takes what of a search, and whom idle nodes help. Pure: seconds are predictions, nothing is measured here.

A node that is free takes the next trial if it would finish it before the others would, all of whom have the rest of
the trials to do, too: the trials that are left are divided among the nodes as samples are, whole and unequal. A slow
node so takes many trials while many are left, and none at the end, when it would be the last one everybody waits for.
Then it joins the trial that would end last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from evener.oracle.apportion import Worker, apportion
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.records.plan import Plan

DIVIDED = 0.93
"""Of their speeds' sum is what nodes reach together, once they share a trial."""
EXCHANGE_SECONDS = 0.003
"""That a step of several nodes takes besides, until it was seen: of small models it is most of it."""
REGROUP_SECONDS = 3.0
"""Until several nodes have measured, planned and begun what one of them did before."""
LEAST_GAIN = 0.05
"""Of the seconds that are left: less is not worth a new beginning."""
HALF = 0.5
"""Of the fastest node's speed is what the upper rungs want."""


class TrialNode(Protocol):
    """A node on which trials can run: of this machine, or of a master."""

    @property
    def name(self) -> str:
        """Of the node."""
        ...

    @property
    def device(self) -> str:
        """As PyTorch names it."""
        ...

    def speed_at(self, step: int) -> float:
        """Speed in `step`, relative to the others."""
        ...


class SearchNode(NamedTuple):
    """A node of the search.

    Attributes:
        name: of the node.
        speed: relative to the others.
        free_in: seconds until it is idle; 0 if it is.
    """

    name: str
    speed: float
    free_in: float


class RunningTrial(NamedTuple):
    """A trial that is under way.

    Attributes:
        number: of the trial.
        nodes: that share it.
        work: seconds that what is left of it would take at speed 1.
        steps: that are left of it.
    """

    number: int
    nodes: tuple[str, ...]
    work: float
    steps: int = 0


class Team(NamedTuple):
    """Nodes that are to go on with a trial together."""

    number: int
    nodes: tuple[str, ...]


def takes_next(name: str, seats: Sequence[SearchNode], remaining: int, work: float) -> bool:
    """Whether the idle node `name` takes one of the `remaining` trials that nobody has begun.

    Args:
        name: of the node.
        seats: all nodes that may take such a trial.
        remaining: number of trials.
        work: seconds that one of them takes at speed 1.
    """
    workers = [Worker(unit_seconds=work / seat.speed, fixed_seconds=seat.free_in) for seat in seats]
    counts = apportion(remaining, workers)
    return any(seat.name == name and count > 0 for seat, count in zip(seats, counts, strict=True))


def is_fast(speed: float, fastest: float) -> bool:
    """Whether a node is fast enough for upper rungs, where few trials are left and all wait for them."""
    return speed >= HALF * fastest


def team_plan(nodes: Sequence[TrialNode], batch_size: int, step_work: float) -> Plan:
    """How nodes divide the batches of a trial: what measuring them would find, without the seconds that it takes.

    Args:
        nodes: one a rank, of known speed.
        batch_size: samples of a step.
        step_work: seconds that a step takes at speed 1.
    """
    workers = [Worker(unit_seconds=step_work / batch_size / node.speed_at(0)) for node in nodes]
    candidates = [Candidate(node=n.name, device=n.device, worker=w) for n, w in zip(nodes, workers, strict=True)]
    return plan_data_parallel(candidates, batch_size, GradientSync(gradient_bytes=0))


def speed_of(speeds: Sequence[float]) -> float:
    """Of nodes that share a trial."""
    return speeds[0] if len(speeds) == 1 else DIVIDED * sum(speeds)


def team_for(
    idle: Sequence[SearchNode],
    running: Sequence[RunningTrial],
    speeds: dict[str, float],
    *,
    exchange_seconds: float = EXCHANGE_SECONDS,
    regroup_seconds: float = REGROUP_SECONDS,
    divides: bool = True,
) -> Team | None:
    """Who is to go on with the trial that would end last, if others make it end sooner; None if they do not.

    Idle nodes join it, or the fastest of them takes it over; where several share it and wait for each other for longer
    than they compute, the fastest of those goes on alone.

    Args:
        idle: nodes for which nothing is left to begin.
        running: trials that may be given other nodes.
        speeds: of all nodes.
        exchange_seconds: that a step of several nodes takes besides.
        regroup_seconds: that stopping and beginning again with several nodes takes.
        divides: whether nodes can share a trial; else a faster one may only take it over.
    """
    if not running:
        return None

    def seconds(trial: RunningTrial, nodes: Sequence[str]) -> float:
        exchanges = trial.steps * exchange_seconds if len(nodes) > 1 else 0.0
        return trial.work / speed_of([speeds[name] for name in nodes]) + exchanges

    last = max(running, key=lambda trial: seconds(trial, trial.nodes))
    present = seconds(last, last.nodes)
    names = [seat.name for seat in sorted(idle, key=lambda seat: -seat.speed)]
    fastest = max((*last.nodes, *names), key=lambda name: speeds[name])
    teams: list[tuple[str, ...]] = [(fastest,)]
    if divides:
        teams += [(*last.nodes, *names[:count]) for count in range(1, len(names) + 1)]
    best = min(teams, key=lambda nodes: seconds(last, nodes))
    gained = present - (seconds(last, best) + regroup_seconds)
    return Team(last.number, best) if gained > LEAST_GAIN * present else None
