"""Which nodes work on which trial of a search, since when, and the predicted time until they are idle. Time is an
argument.
"""

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

_INITIAL_EPOCH_SECONDS = 1.0
"""Assumed seconds of an epoch at speed 1 before one was measured; only its ratio to other trials matters."""


@dataclass
class Attempt:
    """A trial's time on one set of nodes.

    Attributes:
        trial: the trial.
        nodes: names of the nodes that share it.
        begun: when the attempt began, in seconds of the clock.
        epoch_begun: when its present epoch began; the first epoch includes the start of the processes.
        verdict: verdict after its last epoch.
        moves: whether it ends only to continue on other nodes.
        first_epoch_seconds: of its first epoch, once that has ended.
    """

    trial: SearchTrial
    nodes: tuple[str, ...]
    begun: float
    epoch_begun: float
    verdict: Verdict = "continue"
    moves: bool = False
    first_epoch_seconds: float = 0.0

    @property
    def is_in_its_first_epoch(self) -> bool:
        """Whether it is in its first epoch, which includes the processes' start and may be part of an epoch only."""
        return self.epoch_begun == self.begun


class Assignments:
    """The nodes of a search and the trials on them.

    Args:
        epochs: epochs of a trial that is not pruned.
        batch_size: samples of a step of a trial.

    Attributes:
        nodes: all nodes that were ever present, by name.
        present: names of the nodes that are present now.
        speeds: relative speed of each node.
        attempts: current attempts, by the number of the trial.
        exchange_seconds: additional seconds of a step on several nodes; a guess until nodes have shared a trial.
    """

    def __init__(self, epochs: int, batch_size: int) -> None:
        self.nodes: dict[str, TrialNode] = {}
        self.present: list[str] = []
        self.speeds: dict[str, float] = {}
        self.attempts: dict[int, Attempt] = {}
        self.exchange_seconds = EXCHANGE_SECONDS
        self._epochs, self._batch_size, self._steps = epochs, batch_size, 1
        self._epoch_works: dict[int, float] = {}
        self._works: list[float] = []
        self._starts: list[float] = []

    def update_nodes(self, nodes: Sequence[TrialNode]) -> None:
        """Set the nodes that are present now."""
        self.present = [node.name for node in nodes]
        self.nodes |= {node.name: node for node in nodes}
        self.speeds |= {node.name: node.speed_at(0) for node in nodes}

    @property
    def idle(self) -> list[str]:
        """Nodes that are present without a trial, the fastest first."""
        busy = {name for attempt in self.attempts.values() for name in attempt.nodes}
        return sorted((name for name in self.present if name not in busy), key=lambda name: -self.speeds[name])

    @property
    def regroup_seconds(self) -> float:
        """Seconds of stopping a trial and starting it with several nodes: at least what starts have taken so far."""
        return max(REGROUP_SECONDS, fmean(self._starts)) if self._starts else REGROUP_SECONDS

    @property
    def work(self) -> float:
        """Seconds at speed 1 that a trial which has not begun will take."""
        return fmean(self._works) if self._works else self._epochs * self._epoch_work(-1)

    def begin(self, trial: SearchTrial, nodes: Sequence[str], now: float) -> None:
        """Assign `nodes` to `trial`."""
        self.attempts[trial.number] = Attempt(trial, tuple(nodes), now, now)
        trial.nodes += [name for name in nodes if name not in trial.nodes]

    def end(self, number: int, now: float) -> Attempt:
        """End a trial's attempt, so that its nodes are idle again, and return it."""
        attempt = self.attempts.pop(number)
        attempt.trial.seconds += (now - attempt.begun) * len(attempt.nodes)
        return attempt

    def epoch_ended(self, number: int, steps: int, now: float) -> None:
        """Record that a trial has completed an epoch of `steps` steps."""
        self._steps = steps
        attempt = self.attempts[number]
        seconds = now - attempt.epoch_begun
        if attempt.is_in_its_first_epoch:
            attempt.first_epoch_seconds = seconds
        elif attempt.trial.epochs == 1 and len(attempt.nodes) == 1:  # the first two of the trial
            self._starts.append(max(0.0, attempt.first_epoch_seconds - seconds))
        if len(attempt.nodes) > 1:
            self._update_exchange_seconds(attempt, now, is_complete=not attempt.is_in_its_first_epoch)
        elif number not in self._epoch_works or not attempt.is_in_its_first_epoch:
            self._epoch_works[number] = seconds * self._speed(attempt)
        attempt.epoch_begun = now

    def update_exchange_seconds(self, now: float) -> None:
        """Raise the estimate of exchange seconds if nodes that share a trial already take longer than predicted."""
        for attempt in self.attempts.values():
            if len(attempt.nodes) > 1:
                self._update_exchange_seconds(attempt, now, is_complete=False)

    def trial_ended(self, trial: SearchTrial) -> None:
        """Record the work of a trial that has ended, after all or some of its epochs."""
        if trial.epochs:
            self._works.append(trial.epochs * self._epoch_work(trial.number))

    def search_nodes(self, now: float, names: Sequence[str]) -> list[SearchNode]:
        """Return these nodes with the seconds until they are idle."""
        free_in = dict.fromkeys(self.nodes, 0.0)
        for attempt in self.attempts.values():
            seconds = self._remaining_work(attempt, now) / self._speed(attempt)
            free_in.update(dict.fromkeys(attempt.nodes, seconds))
        return [SearchNode(name, self.speeds[name], free_in[name]) for name in names]

    def running(self, now: float) -> list[RunningTrial]:
        """Return the trials that continue and have completed an epoch, so that their remaining time is known."""
        return [
            RunningTrial(
                number,
                attempt.nodes,
                self._remaining_work(attempt, now),
                self._steps * (self._epochs - attempt.trial.epochs),
            )
            for number, attempt in self.attempts.items()
            if attempt.verdict == "continue" and not attempt.moves and attempt.trial.epochs
        ]

    def team_plan(self, number: int, names: Sequence[str]) -> Plan | None:
        """Return the plan by which these nodes share a trial; None for a single node."""
        nodes = [self.nodes[name] for name in names]
        step_work = self._epoch_work(number) / self._steps
        return team_plan(nodes, self._batch_size, step_work) if len(nodes) > 1 else None

    def fast_names(self) -> list[str]:
        """Return the nodes that are fast enough for upper rungs."""
        fastest = max((self.speeds[name] for name in self.present), default=0.0)
        return [name for name in self.present if is_fast(self.speeds[name], fastest)]

    def _update_exchange_seconds(self, attempt: Attempt, now: float, *, is_complete: bool) -> None:
        """Estimate exchange seconds from an epoch of several nodes; an incomplete epoch can only raise the estimate."""
        start = self.regroup_seconds if attempt.is_in_its_first_epoch else 0.0
        computing = self._epoch_work(attempt.trial.number) / self._speed(attempt)
        seconds = (now - attempt.epoch_begun - start - computing) / self._steps
        self.exchange_seconds = max(0.0 if is_complete else self.exchange_seconds, seconds)

    def _remaining_work(self, attempt: Attempt, now: float) -> float:
        """Return the seconds at speed 1 until a trial's last epoch is done."""
        epoch_work = self._epoch_work(attempt.trial.number)
        done = min((now - attempt.epoch_begun) * self._speed(attempt), epoch_work)
        return max(0.0, (self._epochs - attempt.trial.epochs) * epoch_work - done)

    def _epoch_work(self, number: int) -> float:
        known = self._epoch_works
        return known.get(number) or (fmean(known.values()) if known else _INITIAL_EPOCH_SECONDS)

    def _speed(self, attempt: Attempt) -> float:
        return speed_of([self.speeds[name] for name in attempt.nodes])
