"""Which node takes which trial, and which trials idle nodes join. Pure: seconds are predictions, nothing is measured
here.

An idle node takes the next trial if it would finish it before the other nodes, which also have the remaining trials to
do. For this the remaining trials are divided among the nodes as samples are, in unequal whole numbers. So a slow node
takes many trials while many remain, and none at the end, when all other nodes would wait for it. It then joins the
trial that would end last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from evener.oracle.apportion import NodeCost, apportion
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.records.plan import Plan

SHARED_EFFICIENCY = 0.93
"""The fraction of the sum of their speeds that nodes reach when they share a trial."""
EXCHANGE_SECONDS = 0.003
"""Assumed additional seconds of a step on several nodes, until measured; for small models they dominate."""
REGROUP_SECONDS = 3.0
"""Seconds until several nodes have measured, planned and continued a trial that one of them ran before."""
MIN_GAIN = 0.05
"""A new team must save at least this fraction of the remaining seconds."""
MIN_FAST_SPEED = 0.5
"""Upper rungs need nodes of at least this fraction of the fastest node's speed."""


class TrialNode(Protocol):
    """A node on which trials can run: of this machine, or of a master."""

    @property
    def name(self) -> str:
        """The name of the node."""
        ...

    @property
    def device(self) -> str:
        """The device as PyTorch names it."""
        ...

    def speed_at(self, step: int) -> float:
        """Return the speed in `step`, relative to the other nodes."""
        ...


class SearchNode(NamedTuple):
    """A node of the search.

    Attributes:
        name: name of the node.
        speed: speed relative to the other nodes.
        free_in: seconds until it is idle; 0 if it is.
    """

    name: str
    speed: float
    free_in: float


class RunningTrial(NamedTuple):
    """A trial that is running.

    Attributes:
        number: number of the trial.
        nodes: names of the nodes that share it.
        work: seconds that its remaining work would take at speed 1.
        steps: remaining steps.
    """

    number: int
    nodes: tuple[str, ...]
    work: float
    steps: int = 0


class Team(NamedTuple):
    """Nodes that will continue a trial together."""

    number: int
    nodes: tuple[str, ...]


def takes_next(name: str, nodes: Sequence[SearchNode], remaining: int, work: float) -> bool:
    """Return whether the idle node `name` takes one of the `remaining` trials that have not begun.

    Args:
        name: name of the node.
        nodes: all nodes that may take such a trial.
        remaining: number of trials.
        work: seconds that one of them takes at speed 1.
    """
    workers = [NodeCost(unit_seconds=work / node.speed, fixed_seconds=node.free_in) for node in nodes]
    counts = apportion(remaining, workers)
    return any(node.name == name and count > 0 for node, count in zip(nodes, counts, strict=True))


def is_fast(speed: float, fastest: float) -> bool:
    """Return whether a node is fast enough for upper rungs, where few trials remain and all nodes wait for them."""
    return speed >= MIN_FAST_SPEED * fastest


def team_plan(nodes: Sequence[TrialNode], batch_size: int, step_work: float) -> Plan:
    """Return the plan by which nodes divide the batches of a trial, from their known speeds instead of a measurement.

    Args:
        nodes: one per rank, of known speed.
        batch_size: samples of a step.
        step_work: seconds that a step takes at speed 1.
    """
    workers = [NodeCost(unit_seconds=step_work / batch_size / node.speed_at(0)) for node in nodes]
    candidates = [Candidate(node=n.name, device=n.device, worker=w) for n, w in zip(nodes, workers, strict=True)]
    return plan_data_parallel(candidates, batch_size, GradientSync(gradient_bytes=0))


def speed_of(speeds: Sequence[float]) -> float:
    """Return the speed of nodes that share a trial."""
    return speeds[0] if len(speeds) == 1 else SHARED_EFFICIENCY * sum(speeds)


def team_for(
    idle: Sequence[SearchNode],
    running: Sequence[RunningTrial],
    speeds: dict[str, float],
    *,
    exchange_seconds: float = EXCHANGE_SECONDS,
    regroup_seconds: float = REGROUP_SECONDS,
    divides: bool = True,
) -> Team | None:
    """Return the team that should continue the trial that would end last; None if no team ends it sooner.

    Idle nodes join the trial, or the fastest of them takes it over. Where several nodes share it and wait for each
    other longer than they compute, the fastest of them continues alone.

    Args:
        idle: nodes for which no trial remains to begin.
        running: trials whose nodes may change.
        speeds: speeds of all nodes.
        exchange_seconds: additional seconds of a step on several nodes.
        regroup_seconds: seconds of stopping and restarting with several nodes.
        divides: whether nodes can share a trial; otherwise a faster node can only take it over.
    """
    if not running:
        return None

    def seconds(trial: RunningTrial, nodes: Sequence[str]) -> float:
        exchanges = trial.steps * exchange_seconds if len(nodes) > 1 else 0.0
        return trial.work / speed_of([speeds[name] for name in nodes]) + exchanges

    last = max(running, key=lambda trial: seconds(trial, trial.nodes))
    present = seconds(last, last.nodes)
    names = [node.name for node in sorted(idle, key=lambda node: -node.speed)]
    fastest = max((*last.nodes, *names), key=lambda name: speeds[name])
    teams: list[tuple[str, ...]] = [(fastest,)]
    if divides:
        teams += [(*last.nodes, *names[:count]) for count in range(1, len(names) + 1)]
    best = min(teams, key=lambda nodes: seconds(last, nodes))
    gained = present - (seconds(last, best) + regroup_seconds)
    return Team(last.number, best) if gained > MIN_GAIN * present else None
