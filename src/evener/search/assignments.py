"""Who works on what in a search, since when, and how long that will take by what was seen. Time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evener.records.plan import Plan
from evener.search.placement import (
    EXCHANGE_SECONDS,
    REGROUP_SECONDS,
    RunningTrial,
    SearchNode,
    TrialNode,
    is_fast,
    speed_of,
    team_plan,
)
from evener.search.trials import SearchTrial, Verdict

_UNKNOWN_EPOCH = 1.0
"""Seconds of an epoch at speed 1, before one was seen: only their ratio to others counts."""


@dataclass
class Stint:
    """A trial's time on some nodes.

    Attributes:
        trial: that is worked on.
        nodes: that share it.
        begun: when.
        epoch_begun: when its present epoch began; the first one has the start of the processes in it.
        verdict: said at the end of its last epoch, if it ends there.
        moves: whether it ends only to go on with other nodes.
    """

    trial: SearchTrial
    nodes: tuple[str, ...]
    begun: float
    epoch_begun: float
    verdict: Verdict = "goes on"
    moves: bool = False

    @property
    def is_in_its_first_epoch(self) -> bool:
        """Which has the start of the processes in it, and may be the rest of an epoch that others began."""
        return self.epoch_begun == self.begun


class Board:
    """The nodes of a search and the trials on them.

    Args:
        epochs: of a trial that is not pruned.
        batch_size: samples of a step of a trial.

    Attributes:
        nodes: that were here, by name.
        here: names of those that are here now.
        speeds: of all, relative to each other.
        stints: what is worked on, by the number of the trial.
        exchange_seconds: that a step of several nodes takes besides: a guess, until some have shared a trial.
    """

    def __init__(self, epochs: int, batch_size: int) -> None:
        self.nodes: dict[str, TrialNode] = {}
        self.here: list[str] = []
        self.speeds: dict[str, float] = {}
        self.stints: dict[int, Stint] = {}
        self.exchange_seconds = EXCHANGE_SECONDS
        self._epochs, self._batch_size, self._steps = epochs, batch_size, 1
        self._epoch_works: dict[int, float] = {}
        self._works: list[float] = []

    def meet(self, nodes: Sequence[TrialNode]) -> None:
        """These nodes are here now, and no others."""
        self.here = [node.name for node in nodes]
        self.nodes |= {node.name: node for node in nodes}
        self.speeds |= {node.name: node.speed_at(0) for node in nodes}

    @property
    def idle(self) -> list[str]:
        """Nodes that are here and work on nothing, the fastest first."""
        busy = {name for stint in self.stints.values() for name in stint.nodes}
        return sorted((name for name in self.here if name not in busy), key=lambda name: -self.speeds[name])

    @property
    def work(self) -> float:
        """Seconds at speed 1 that a trial which has not begun will take."""
        return fmean(self._works) if self._works else self._epochs * self._epoch_work(-1)

    def begin(self, trial: SearchTrial, nodes: Sequence[str], now: float) -> None:
        """`nodes` begin to work on `trial`."""
        self.stints[trial.number] = Stint(trial, tuple(nodes), now, now)
        trial.nodes += [name for name in nodes if name not in trial.nodes]

    def end(self, number: int, now: float) -> Stint:
        """The nodes of a trial are idle again."""
        stint = self.stints.pop(number)
        stint.trial.seconds += (now - stint.begun) * len(stint.nodes)
        return stint

    def epoch_ended(self, number: int, steps: int, now: float) -> None:
        """A trial has done an epoch of so many steps."""
        self._steps = steps
        stint = self.stints[number]
        if len(stint.nodes) > 1:
            self._learn_exchange(stint, now, is_whole=not stint.is_in_its_first_epoch)
        elif number not in self._epoch_works or not stint.is_in_its_first_epoch:
            self._epoch_works[number] = (now - stint.epoch_begun) * self._speed(stint)
        stint.epoch_begun = now

    def watch_exchanges(self, now: float) -> None:
        """Learn from nodes that share a trial, before their epoch ends, that it takes longer than was thought."""
        for stint in self.stints.values():
            if len(stint.nodes) > 1:
                self._learn_exchange(stint, now, is_whole=False)

    def trial_ended(self, trial: SearchTrial) -> None:
        """A trial is over, after all or some of its epochs."""
        if trial.epochs:
            self._works.append(trial.epochs * self._epoch_work(trial.number))

    def seats(self, now: float, names: Sequence[str]) -> list[SearchNode]:
        """These nodes, with when they will be idle."""
        free_in = dict.fromkeys(self.nodes, 0.0)
        for stint in self.stints.values():
            seconds = self._left(stint, now) / self._speed(stint)
            free_in.update(dict.fromkeys(stint.nodes, seconds))
        return [SearchNode(name, self.speeds[name], free_in[name]) for name in names]

    def running(self, now: float) -> list[RunningTrial]:
        """The trials that go on and have done an epoch, so that it is known how long they take."""
        return [
            RunningTrial(number, stint.nodes, self._left(stint, now), self._steps * (self._epochs - stint.trial.epochs))
            for number, stint in self.stints.items()
            if stint.verdict == "goes on" and not stint.moves and stint.trial.epochs
        ]

    def team_plan(self, number: int, names: Sequence[str]) -> Plan | None:
        """How these nodes share a trial; None for one alone."""
        nodes = [self.nodes[name] for name in names]
        step_work = self._epoch_work(number) / self._steps
        return team_plan(nodes, self._batch_size, step_work) if len(nodes) > 1 else None

    def fast_names(self) -> list[str]:
        """Nodes that are fast enough for upper rungs."""
        fastest = max((self.speeds[name] for name in self.here), default=0.0)
        return [name for name in self.here if is_fast(self.speeds[name], fastest)]

    def _learn_exchange(self, stint: Stint, now: float, *, is_whole: bool) -> None:
        """From the seconds of an epoch of several nodes; what has passed of one that goes on can only raise it."""
        start = REGROUP_SECONDS if stint.is_in_its_first_epoch else 0.0
        computing = self._epoch_work(stint.trial.number) / self._speed(stint)
        seconds = (now - stint.epoch_begun - start - computing) / self._steps
        self.exchange_seconds = max(0.0 if is_whole else self.exchange_seconds, seconds)

    def _left(self, stint: Stint, now: float) -> float:
        """Seconds at speed 1 until a trial's last epoch is done."""
        epoch_work = self._epoch_work(stint.trial.number)
        done = min((now - stint.epoch_begun) * self._speed(stint), epoch_work)
        return max(0.0, (self._epochs - stint.trial.epochs) * epoch_work - done)

    def _epoch_work(self, number: int) -> float:
        known = self._epoch_works
        return known.get(number) or (fmean(known.values()) if known else _UNKNOWN_EPOCH)

    def _speed(self, stint: Stint) -> float:
        return speed_of([self.speeds[name] for name in stint.nodes])
