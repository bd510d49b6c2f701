"""One trial of a search as far as it has come, and what follows from what is known of it. No clock, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evener.records.search_record import Outcome
from evener.search.halving import Pruning, goes_on, rungs_of

ATTEMPTS = 3
"""Times that a trial is begun whose nodes die."""
Verdict = Literal["goes on", "complete", "pruned"]


@dataclass
class SearchTrial:
    """A trial.

    Attributes:
        number: from 0.
        values: options that were drawn, as text.
        scores: by epoch, from 1.
        outcome: None while it is not over.
        reason: why it failed or was pruned; empty if its scores say that.
        attempts: that ended with the death of a node.
        nodes: names of those that worked on it, in that order.
        seconds: that nodes spent on it, summed.
        team: nodes that are to go on with it together; empty for any.
        avoided: nodes that it does not fit.
        wants_fast: whether it has come to the upper rungs.
        is_told: whether the sampler knows its outcome.
    """

    number: int
    values: dict[str, str]
    scores: dict[int, float] = field(default_factory=dict)
    outcome: Outcome | None = None
    reason: str = ""
    attempts: int = 0
    nodes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    team: tuple[str, ...] = ()
    avoided: set[str] = field(default_factory=set)
    wants_fast: bool = False
    is_told: bool = False

    @property
    def epochs(self) -> int:
        """That it has done."""
        return max(self.scores, default=0)

    @property
    def score(self) -> float | None:
        """After its last epoch."""
        return self.scores.get(self.epochs)


@dataclass(frozen=True)
class Rules:
    """How trials are judged.

    Attributes:
        epochs: of a trial that is not pruned.
        pruning: by which rule.
        ahead: trials that are drawn before the results of those before them count.
        larger_is_better: of scores.
    """

    epochs: int
    pruning: Pruning
    ahead: int
    larger_is_better: bool

    def verdict(self, trial: SearchTrial, trials: Mapping[int, SearchTrial]) -> Verdict:
        """What follows from the scores of `trial`, beside those of the `trials` that were known when it was drawn.

        The same whenever it is asked, also by a search that goes on after it was killed.
        """
        for rung in rungs_of(trial.number, self.epochs, self.pruning)[:-1]:
            own = trial.scores.get(rung)
            if own is None:
                break
            known = [trials[number] for number in range(max(0, trial.number - self.ahead))]
            others = [one.scores[rung] for one in known if rung in one.scores]
            if not goes_on(own, others, larger_is_better=self.larger_is_better):
                return "pruned"
        return "complete" if self.epochs in trial.scores else "goes on"

    def is_upper(self, trial: SearchTrial) -> bool:
        """Whether a trial has passed its second rung, so that fast nodes are to go on with it."""
        rungs = rungs_of(trial.number, self.epochs, self.pruning)
        return len(rungs) > 2 and trial.epochs >= rungs[1]

    def best(self, trials: Sequence[SearchTrial]) -> SearchTrial | None:
        """The complete trial with the best score, the earlier one of equals; None if none is complete."""
        found = [trial for trial in trials if trial.outcome == "complete" and trial.score is not None]
        sign = -1.0 if self.larger_is_better else 1.0
        return min(found, key=lambda trial: (sign * (trial.score or 0.0), trial.number), default=None)
