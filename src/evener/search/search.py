"""The search loop: assigns trials to nodes, collects scores and prunes, until every trial is over.

    while trials remain:
        idle nodes take trials; if none remain, idle nodes join the slowest one
        an epoch ended:   write its score to the journal, then let the trial continue or end
        a run ended:      complete, pruned, failed; or back to the queue, from its checkpoint

Every result is in the journal before the search acts on it. A resumed search therefore counts nothing twice and loses
no trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from evener.records.error_kind import restated
from evener.records.errors import DoesNotFit, EvenerError, Interrupted, NodeLost, NotExact
from evener.records.plan import Plan
from evener.records.record import Epoch
from evener.records.search_record import Outcome
from evener.search.assignments import Assignments, Attempt
from evener.search.local_runner import RunEnd, TrialRunner
from evener.search.placement import takes_next, team_for
from evener.search.space import Suggest
from evener.search.study import Study
from evener.search.trial_folder import TrialFolder
from evener.search.trials import MAX_LOST_ATTEMPTS, Rules, SearchTrial

_PAUSE_S = 0.2
_MAX_EQUAL_ERRORS = 5
"""Consecutive trials with the same error that end the search."""


class Search:
    """A search.

    Args:
        study: the study, which stores all results.
        rules: rules that judge trials.
        assignments: assignments of nodes to trials.
        runner: runs the trials.
        suggest: draws options.
        folder_of: returns the folder of a trial by its number.
        config_of: returns the configuration of a trial's run, given the plan by which several nodes share it.
        score_of: returns the score of an epoch in the metric of the search.
        num_trials: number of trials to run.
        until: time of the clock, in seconds, after which no trial begins.
        divides: whether several nodes can share a trial.
        joins: whether idle nodes join running trials.
        notify: called with a trial and a sentence whenever something happens to it.
        on_change: called with this search, often, while it runs.
        clock: returns seconds.

    Attributes:
        trials: all trials that have begun, by number.
    """

    def __init__(
        self,
        *,
        study: Study,
        rules: Rules,
        assignments: Assignments,
        runner: TrialRunner,
        suggest: Suggest,
        folder_of: Callable[[int], TrialFolder],
        config_of: Callable[[SearchTrial, Plan | None], Any],
        score_of: Callable[[Epoch], float],
        num_trials: int,
        until: float = inf,
        divides: bool = True,
        joins: bool = True,
        notify: Callable[[SearchTrial, str], None],
        on_change: Callable[[Search], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._rules, self._assignments, self._runner = study, rules, assignments, runner
        self._suggest, self._folder_of, self._config_of, self._score_of = suggest, folder_of, config_of, score_of
        self._num_trials, self._until, self._divides, self._joins = num_trials, until, divides, joins
        self._notify, self._on_change, self._clock = notify, on_change, clock
        self._last_error, self._num_equal_errors = "", 0
        self.trials: dict[int, SearchTrial] = {}

    @property
    def best(self) -> SearchTrial | None:
        """The best complete trial so far."""
        return self._rules.best(list(self.trials.values()))

    @property
    def running(self) -> frozenset[int]:
        """Numbers of the trials that nodes work on."""
        return frozenset(self._assignments.attempts)

    def run(self) -> None:
        """Run all trials. Raises EvenerError if the same error ends several consecutive trials."""
        self._restore()
        while self._assign_idle_nodes(self._clock()):
            self._on_change(self)
            for number, event in self._runner.receive(_PAUSE_S):
                if isinstance(event, RunEnd):
                    self._ended(self._assignments.end(number, self._clock()), event)
                elif isinstance(event, Epoch):
                    self._epoch_ended(number, event)
        self._tell_sampler(len(self.trials))

    def _restore(self) -> None:
        """Restore the trials that an earlier search has written to the study."""
        for known in self._study.known():
            trial = SearchTrial(known.number, known.values, dict(known.scores), is_told=known.is_told)
            trial.lost_attempts = known.notes.get("attempts", 0)
            nodes, trial.seconds = known.notes.get("spent", ((), 0.0))
            trial.nodes = list(nodes)
            trial.outcome, trial.reason = known.notes.get("ended", (None, ""))
            self.trials[known.number] = trial
            if not trial.values:  # the search was killed between drawing and writing
                trial.values = self._study.ask_again(known.number, self._suggest)
        for trial in self.trials.values():
            verdict = self._rules.verdict(trial, self.trials)
            if trial.outcome is None and verdict != "continue":
                self._conclude(trial, verdict)

    def _assign_idle_nodes(self, now: float) -> bool:
        """Assign trials to idle nodes; return whether any trial is running or waits for nodes."""
        self._assignments.update_nodes(self._runner.nodes())
        reserved = self._start_teams(now)
        for name in self._assignments.idle:
            trial = None if name in reserved else self._next_for(name, now)
            if trial is not None:
                self._start(trial, (name,), now)
        self._join_slowest(now, reserved)
        is_unfinished = self._num_undrawn(now) > 0 or any(trial.outcome is None for trial in self.trials.values())
        return bool(self._assignments.attempts) or (is_unfinished and not self._assignments.present)

    def _num_undrawn(self, now: float) -> int:
        return self._num_trials - len(self.trials) if now < self._until else 0

    def _waiting(self) -> list[SearchTrial]:
        """Return trials that have begun, are not over, and have no nodes."""
        return [
            trial
            for trial in self.trials.values()
            if trial.outcome is None and trial.number not in self._assignments.attempts and not trial.team
        ]

    def _next_for(self, name: str, now: float) -> SearchTrial | None:
        """Return the trial that an idle node takes; None if other nodes would finish it sooner."""
        fast = self._assignments.fast_names()
        waiting = [
            trial for trial in self._waiting() if name not in trial.avoided and (not trial.wants_fast or name in fast)
        ]
        undrawn = self._num_undrawn(now)
        remaining = len(waiting) + undrawn
        nodes = self._assignments.search_nodes(now, self._assignments.present)
        if not remaining or not takes_next(name, nodes, remaining, self._assignments.work):
            return None
        if waiting:
            return min(waiting, key=lambda trial: trial.number)
        return self._draw() if undrawn else None

    def _draw(self) -> SearchTrial | None:
        """Draw a new trial; return None while the results on which the draw depends are unknown."""
        number = len(self.trials)
        first = max(0, number - self._rules.ahead)
        if any(self.trials[earlier].outcome is None for earlier in range(first)):
            return None
        self._tell_sampler(first)
        trial = self.trials[number] = SearchTrial(number, self._study.ask(number, self._suggest))
        return trial

    def _tell_sampler(self, stop: int) -> None:
        """Report the outcomes of the trials before `stop` to the sampler, in their order."""
        for number in range(stop):
            trial = self.trials[number]
            if not trial.is_told and trial.outcome is not None:
                self._study.tell(number, trial.outcome, trial.score)
                trial.is_told = True

    def _start(self, trial: SearchTrial, names: tuple[str, ...], now: float) -> None:
        trial.team = ()
        self._assignments.begin(trial, names, now)
        self._folder_of(trial.number).forget_unreported(trial.epochs)
        config = self._config_of(trial, self._assignments.team_plan(trial.number, names))
        self._runner.start(trial.number, names, config)

    def _start_teams(self, now: float) -> set[str]:
        """Start trials whose team is idle; return the nodes that wait for other members of their team."""
        attempts = self._assignments.attempts
        for trial in [trial for trial in self.trials.values() if trial.team and trial.number not in attempts]:
            if set(trial.team) <= set(self._assignments.idle):
                self._start(trial, trial.team, now)
        return {name for trial in self.trials.values() if trial.outcome is None for name in trial.team}

    def _join_slowest(self, now: float, reserved: set[str]) -> None:
        """Let idle nodes without a trial join the trial that would end last, or leave it to a single node again."""
        if not self._joins or reserved:
            return
        self._assignments.update_exchange_seconds(now)
        team = team_for(
            self._assignments.search_nodes(now, self._assignments.idle),
            self._assignments.running(now),
            self._assignments.speeds,
            exchange_seconds=self._assignments.exchange_seconds,
            regroup_seconds=self._assignments.regroup_seconds,
            divides=self._divides,
        )
        if team is not None:
            self.trials[team.number].team = team.nodes
            self._assignments.attempts[team.number].moves = True
            self._runner.stop(team.number)

    def _epoch_ended(self, number: int, epoch: Epoch) -> None:
        """Write the score of an epoch to the study, judge the trial, and answer its run."""
        attempt = self._assignments.attempts[number]
        trial = attempt.trial
        if epoch.epoch + 1 in trial.scores or attempt.verdict != "continue":
            self._runner.answer(number, epoch, attempt.verdict != "continue" or attempt.moves)
            return  # the epoch was reported before, or came after the end of the trial
        score = self._score_of(epoch)
        self._assignments.epoch_ended(number, epoch.step // (epoch.epoch + 1), self._clock())
        trial.scores[epoch.epoch + 1] = score
        self._folder_of(number).record_epoch(epoch)
        self._study.report(number, epoch.epoch + 1, score)
        attempt.verdict = self._rules.verdict(trial, self.trials)
        if attempt.verdict == "continue" and not attempt.moves:
            trial.wants_fast = self._rules.is_upper(trial)
            attempt.moves = trial.wants_fast and set(attempt.nodes).isdisjoint(self._assignments.fast_names())
        self._runner.answer(number, epoch, attempt.verdict != "continue" or attempt.moves)

    def _ended(self, attempt: Attempt, end: RunEnd) -> None:
        """Decide what the end of a run means for its trial."""
        trial, error = attempt.trial, end.error
        self._study.note(trial.number, "spent", [trial.nodes, trial.seconds])  # one line: each is synced to the disk
        if attempt.verdict != "continue":
            self._conclude(trial, attempt.verdict)
        elif end.has_diverged:
            self._conclude(trial, "pruned", f"diverged: {error}")
        elif attempt.moves and (error is None or isinstance(error, NodeLost | Interrupted)):
            return  # it continues on other nodes
        elif len(attempt.nodes) > 1 and isinstance(error, NotExact):
            self._divides = False
            self._notify(trial, f"continues on one node, as do all other trials: {error}")
        elif end.is_refused:
            return  # it waits for nodes
        elif error is None or isinstance(error, NodeLost):
            self._lost(trial, error or NodeLost("its run ended without a score"))
        elif self._fits_elsewhere(trial, error, end):
            trial.avoided |= set(attempt.nodes)
        else:
            self._failed(trial, error)

    def _fits_elsewhere(self, trial: SearchTrial, error: EvenerError, end: RunEnd) -> bool:
        """Return whether another node may succeed: one with more memory, or, once, with other data and modules."""
        is_of_node = isinstance(error, DoesNotFit) or (end.of_node and not trial.avoided)
        return is_of_node and len(trial.avoided) + 1 < len(self._assignments.present)

    def _lost(self, trial: SearchTrial, error: EvenerError) -> None:
        """Return a trial that lost its node to its last checkpoint."""
        trial.lost_attempts += 1
        self._study.note(trial.number, "attempts", trial.lost_attempts)
        if trial.lost_attempts >= MAX_LOST_ATTEMPTS:
            self._failed(trial, restated(error, f"{error} ({MAX_LOST_ATTEMPTS} nodes lost in total)"))
        else:
            self._notify(trial, f"restarts from epoch {trial.epochs}: {error}")

    def _failed(self, trial: SearchTrial, error: EvenerError) -> None:
        """End a trial whose task failed or that lost too many nodes."""
        reason = str(error)
        self._conclude(trial, "failed", reason)
        self._num_equal_errors = self._num_equal_errors + 1 if self._last_error == reason else 1
        self._last_error = reason
        if self._num_equal_errors == _MAX_EQUAL_ERRORS:
            raise restated(error, f"{_MAX_EQUAL_ERRORS} consecutive trials failed with the same error: {reason}")

    def _conclude(self, trial: SearchTrial, outcome: Outcome, reason: str = "") -> None:
        """End a trial: write its outcome to the study, and keep only the files that are still needed."""
        earlier = self.best
        trial.outcome, trial.reason, trial.team = outcome, reason, ()
        self._study.note(trial.number, "ended", [outcome, reason])
        self._assignments.trial_ended(trial)
        if outcome != "failed":
            self._last_error, self._num_equal_errors = "", 0
        self._runner.forget(trial.number)
        self._folder_of(trial.number).conclude(keep_weights=self.best is trial)
        if earlier is not None and self.best is trial:
            self._folder_of(earlier.number).conclude(keep_weights=False)
        self._notify(trial, outcome)
