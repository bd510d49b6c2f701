"""The search: give nodes work, hear how it goes, judge, until every trial is over.

    while trials are left:
        idle nodes take trials; those for whom nothing is left help the slowest one
        an epoch ended:   write its score down, then say: go on, or end
        a run ended:      complete, pruned, failed; or back to the queue, from its checkpoint

What was found is in the journal before anybody acts upon it, so whoever goes on with the study after a crash counts
nothing twice and loses no trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from evener.config.run_config import RunConfig
from evener.records.error_kind import restated
from evener.records.errors import DoesNotFit, EvenerError, Interrupted, NodeLost, NotExact
from evener.records.plan import Plan
from evener.records.record import Epoch
from evener.records.search_record import Outcome
from evener.search.assignments import Board, Stint
from evener.search.local_backend import RunEnd, Runs
from evener.search.placement import takes_next, team_for
from evener.search.space import Suggest
from evener.search.study import Study
from evener.search.trial_folder import TrialFolder
from evener.search.trials import ATTEMPTS, Rules, SearchTrial

_PAUSE = 0.2
_SAME_ERRORS = 5
"""In a row: what ends every trial ends the search."""


class Search:
    """A search.

    Args:
        study: that remembers.
        rules: by which trials are judged.
        board: of nodes.
        runs: of trials.
        suggest: draws options.
        folder_of: the folder of a trial, by its number.
        config_of: what is asked of the run of a trial, and how several nodes share it.
        score_of: an epoch, in the metric of the search.
        num_trials: wanted.
        until: seconds of the clock after which no trial begins.
        divides: whether several nodes can share a trial.
        joins: whether idle nodes help.
        tell: called with a sentence about everything that happens.
        watch: called with this search, often, while it goes on.
        clock: seconds.

    Attributes:
        trials: all that have begun, by number.
    """

    def __init__(
        self,
        *,
        study: Study,
        rules: Rules,
        board: Board,
        runs: Runs,
        suggest: Suggest,
        folder_of: Callable[[int], TrialFolder],
        config_of: Callable[[SearchTrial, Plan | None], RunConfig],
        score_of: Callable[[Epoch], float],
        num_trials: int,
        until: float = inf,
        divides: bool = True,
        joins: bool = True,
        tell: Callable[[SearchTrial, str], None],
        watch: Callable[[Search], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._rules, self._board, self._runs = study, rules, board, runs
        self._suggest, self._folder_of, self._config_of, self._score_of = suggest, folder_of, config_of, score_of
        self._num_trials, self._until, self._divides, self._joins = num_trials, until, divides, joins
        self._tell, self._watch, self._clock = tell, watch, clock
        self._same = ("", 0)
        self.trials: dict[int, SearchTrial] = {}

    @property
    def best(self) -> SearchTrial | None:
        """The best complete trial so far."""
        return self._rules.best(list(self.trials.values()))

    @property
    def running(self) -> frozenset[int]:
        """Numbers of the trials that nodes work on."""
        return frozenset(self._board.stints)

    def run(self) -> None:
        """All trials. Raises EvenerError: one error ends every trial."""
        self._recall()
        while self._give_out(self._clock()):
            self._watch(self)
            for number, said in self._runs.receive(_PAUSE):
                if isinstance(said, RunEnd):
                    self._ended(self._board.end(number, self._clock()), said)
                elif isinstance(said, Epoch):
                    self._epoch_ended(number, said)
        self._tell_sampler(len(self.trials))

    def _recall(self) -> None:
        """Know what an earlier search has written into the study."""
        for known in self._study.known():
            trial = SearchTrial(known.number, known.values, dict(known.scores), is_told=known.is_told)
            trial.attempts = known.notes.get("attempts", 0)
            nodes, trial.seconds = known.notes.get("spent", ((), 0.0))
            trial.nodes = list(nodes)
            trial.outcome, trial.reason = known.notes.get("ended", (None, ""))
            self.trials[known.number] = trial
            if not trial.values:  # killed between drawing and writing down
                trial.values = self._study.ask_again(known.number, self._suggest)
        for trial in self.trials.values():
            verdict = self._rules.verdict(trial, self.trials)
            if trial.outcome is None and verdict != "goes on":
                self._conclude(trial, verdict)

    def _give_out(self, now: float) -> bool:
        """Give idle nodes work; whether any trial is under way, or waits for nodes."""
        self._board.meet(self._runs.nodes())
        reserved = self._start_teams(now)
        for name in self._board.idle:
            trial = None if name in reserved else self._next_for(name, now)
            if trial is not None:
                self._start(trial, (name,), now)
        self._help(now, reserved)
        is_left = self._num_unasked(now) > 0 or any(one.outcome is None for one in self.trials.values())
        return bool(self._board.stints) or (is_left and not self._board.here)

    def _num_unasked(self, now: float) -> int:
        return self._num_trials - len(self.trials) if now < self._until else 0

    def _waiting(self) -> list[SearchTrial]:
        """Trials that have begun, are not over, and nobody works on."""
        return [
            trial
            for trial in self.trials.values()
            if trial.outcome is None and trial.number not in self._board.stints and not trial.team
        ]

    def _next_for(self, name: str, now: float) -> SearchTrial | None:
        """The trial that an idle node takes; None if it would be done with it later than the others."""
        fast = self._board.fast_names()
        waiting = [
            trial for trial in self._waiting() if name not in trial.avoided and (not trial.wants_fast or name in fast)
        ]
        unasked = self._num_unasked(now)
        remaining = len(waiting) + unasked
        seats = self._board.seats(now, self._board.here)
        if not remaining or not takes_next(name, seats, remaining, self._board.work):
            return None
        if waiting:
            return min(waiting, key=lambda trial: trial.number)
        return self._ask() if unasked else None

    def _ask(self) -> SearchTrial | None:
        """A new trial; None while the results that it is to be drawn from are not known."""
        number = len(self.trials)
        first = max(0, number - self._rules.ahead)
        if any(self.trials[earlier].outcome is None for earlier in range(first)):
            return None
        self._tell_sampler(first)
        trial = self.trials[number] = SearchTrial(number, self._study.ask(number, self._suggest))
        return trial

    def _tell_sampler(self, stop: int) -> None:
        """Let the sampler know the outcomes of the trials before `stop`, in their order."""
        for number in range(stop):
            trial = self.trials[number]
            if not trial.is_told and trial.outcome is not None:
                self._study.tell(number, trial.outcome, trial.score)
                trial.is_told = True

    def _start(self, trial: SearchTrial, names: tuple[str, ...], now: float) -> None:
        trial.team = ()
        self._board.begin(trial, names, now)
        self._folder_of(trial.number).forget_unreported(trial.epochs)
        config = self._config_of(trial, self._board.team_plan(trial.number, names))
        self._runs.start(trial.number, names, config)

    def _start_teams(self, now: float) -> set[str]:
        """Let trials go on whose team is complete; the nodes that wait for the others of their team."""
        for trial in [one for one in self.trials.values() if one.team and one.number not in self._board.stints]:
            if set(trial.team) <= set(self._board.idle):
                self._start(trial, trial.team, now)
        return {name for trial in self.trials.values() if trial.outcome is None for name in trial.team}

    def _help(self, now: float, reserved: set[str]) -> None:
        """Let idle nodes, for which nothing is left, join the trial that would end last, or leave it to one again."""
        if not self._joins or reserved:
            return
        self._board.watch_exchanges(now)
        team = team_for(
            self._board.seats(now, self._board.idle),
            self._board.running(now),
            self._board.speeds,
            exchange_seconds=self._board.exchange_seconds,
            divides=self._divides,
        )
        if team is not None:
            self.trials[team.number].team = team.nodes
            self._board.stints[team.number].moves = True
            self._runs.stop(team.number)

    def _epoch_ended(self, number: int, epoch: Epoch) -> None:
        """Write a score down, judge the trial, and let its run know."""
        stint = self._board.stints[number]
        trial = stint.trial
        if epoch.epoch + 1 in trial.scores or stint.verdict != "goes on":
            self._runs.answer(number, epoch, stint.verdict != "goes on" or stint.moves)
            return  # it is known from before, or came after what ended the trial
        score = self._score_of(epoch)
        self._board.epoch_ended(number, epoch.step // (epoch.epoch + 1), self._clock())
        trial.scores[epoch.epoch + 1] = score
        self._study.report(number, epoch.epoch + 1, score)
        self._folder_of(number).reported(epoch)
        stint.verdict = self._rules.verdict(trial, self.trials)
        if stint.verdict == "goes on" and not stint.moves:
            trial.wants_fast = self._rules.is_upper(trial)
            stint.moves = trial.wants_fast and set(stint.nodes).isdisjoint(self._board.fast_names())
        self._runs.answer(number, epoch, stint.verdict != "goes on" or stint.moves)

    def _ended(self, stint: Stint, end: RunEnd) -> None:
        """A run is over: what that means for its trial."""
        trial, error = stint.trial, end.error
        self._write_down(trial)
        if stint.verdict != "goes on":
            self._conclude(trial, stint.verdict)
        elif end.has_diverged:
            self._conclude(trial, "pruned", f"diverged: {error}")
        elif stint.moves and (error is None or isinstance(error, NodeLost | Interrupted)):
            return  # it goes on elsewhere
        elif len(stint.nodes) > 1 and isinstance(error, NotExact):
            self._divides = False
            self._tell(trial, f"goes on with one node, as all others: {error}")
        elif end.is_refused:
            return  # it waits for nodes
        elif error is None or isinstance(error, NodeLost):
            self._lost(trial, error or NodeLost("its run ended without a score"))
        elif self._fits_elsewhere(trial, error, end):
            trial.avoided |= set(stint.nodes)
        else:
            self._failed(trial, error)

    def _fits_elsewhere(self, trial: SearchTrial, error: EvenerError, end: RunEnd) -> bool:
        """Whether what ended a run on a node may not end it on another: memory, or, once, data and modules there."""
        is_of_node = isinstance(error, DoesNotFit) or (end.of_node and not trial.avoided)
        return is_of_node and len(trial.avoided) + 1 < len(self._board.here)

    def _lost(self, trial: SearchTrial, error: EvenerError) -> None:
        """A node died under a trial, which goes back to its last checkpoint."""
        trial.attempts += 1
        self._study.note(trial.number, "attempts", trial.attempts)
        if trial.attempts >= ATTEMPTS:
            self._failed(trial, restated(error, f"{error}, the {ATTEMPTS}rd time"))
        else:
            self._tell(trial, f"goes back to epoch {trial.epochs}: {error}")

    def _failed(self, trial: SearchTrial, error: EvenerError) -> None:
        """The task's own code failed, or nodes died too often."""
        reason = str(error)
        self._conclude(trial, "failed", reason)
        self._same = (reason, self._same[1] + 1 if self._same[0] == reason else 1)
        if self._same[1] == _SAME_ERRORS:
            raise restated(error, f"{_SAME_ERRORS} trials ended alike: {reason}")

    def _conclude(self, trial: SearchTrial, outcome: Outcome, reason: str = "") -> None:
        """A trial is over: write that down, keep of it what may be wanted."""
        earlier = self.best
        trial.outcome, trial.reason, trial.team = outcome, reason, ()
        self._study.note(trial.number, "ended", [outcome, reason])
        self._board.trial_ended(trial)
        if outcome != "failed":
            self._same = ("", 0)
        self._runs.forget(trial.number)
        self._folder_of(trial.number).conclude(keep_weights=self.best is trial)
        if earlier is not None and self.best is trial:
            self._folder_of(earlier.number).conclude(keep_weights=False)
        self._tell(trial, outcome)

    def _write_down(self, trial: SearchTrial) -> None:
        self._study.note(trial.number, "spent", [trial.nodes, trial.seconds])  # one line: each is synced to the disk
