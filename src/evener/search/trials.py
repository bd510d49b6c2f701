"""The state of one trial of a search, and the rules that judge it. No clock, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evener.records.search_record import Outcome
from evener.search.halving import Pruning, rungs_of, survives

MAX_LOST_ATTEMPTS = 3
"""A trial fails after it has lost its nodes this many times."""
Verdict = Literal["continue", "complete", "pruned"]


@dataclass
class SearchTrial:
    """A trial.

    Attributes:
        number: number of the trial, from 0.
        values: drawn options, as text.
        scores: score by epoch, from 1.
        outcome: None while it is not over.
        reason: why it failed or was pruned; empty if its scores are the reason.
        lost_attempts: attempts that ended with the loss of a node.
        nodes: names of the nodes that worked on it, in order.
        seconds: seconds that nodes spent on it, summed.
        team: nodes that will continue it together; empty for any node.
        avoided: nodes that it does not fit.
        wants_fast: whether it has reached the upper rungs.
        is_told: whether the sampler knows its outcome.
    """

    number: int
    values: dict[str, str]
    scores: dict[int, float] = field(default_factory=dict)
    outcome: Outcome | None = None
    reason: str = ""
    lost_attempts: int = 0
    nodes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    team: tuple[str, ...] = ()
    avoided: set[str] = field(default_factory=set)
    wants_fast: bool = False
    is_told: bool = False

    @property
    def epochs(self) -> int:
        """The number of epochs that it has completed."""
        return max(self.scores, default=0)

    @property
    def score(self) -> float | None:
        """The score after its last epoch."""
        return self.scores.get(self.epochs)


@dataclass(frozen=True)
class Rules:
    """The rules that judge trials.

    Attributes:
        epochs: epochs of a trial that is not pruned.
        pruning: the pruning rule.
        ahead: trials that are drawn before earlier results count.
        larger_is_better: whether larger scores are better.
    """

    epochs: int
    pruning: Pruning
    ahead: int
    larger_is_better: bool

    def verdict(self, trial: SearchTrial, trials: Mapping[int, SearchTrial]) -> Verdict:
        """Return the verdict on `trial` from its scores and those of the `trials` that were known when it was drawn.

        The verdict is the same at any time, also in a resumed search.
        """
        for rung in rungs_of(trial.number, self.epochs, self.pruning)[:-1]:
            score = trial.scores.get(rung)
            if score is None:
                break
            known = [trials[number] for number in range(max(0, trial.number - self.ahead))]
            others = [other.scores[rung] for other in known if rung in other.scores]
            if not survives(score, others, larger_is_better=self.larger_is_better):
                return "pruned"
        return "complete" if self.epochs in trial.scores else "continue"

    def is_upper(self, trial: SearchTrial) -> bool:
        """Return whether a trial has passed its second rung, so that fast nodes should continue it."""
        rungs = rungs_of(trial.number, self.epochs, self.pruning)
        return len(rungs) > 2 and trial.epochs >= rungs[1]

    def best(self, trials: Sequence[SearchTrial]) -> SearchTrial | None:
        """Return the complete trial with the best score, the earlier of equal ones; None if none is complete."""
        complete = [trial for trial in trials if trial.outcome == "complete" and trial.score is not None]
        sign = -1.0 if self.larger_is_better else 1.0
        return min(complete, key=lambda trial: (sign * (trial.score or 0.0), trial.number), default=None)
