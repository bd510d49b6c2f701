"""What a search found, as a JSON file beside its journal: `study.json`."""

from __future__ import annotations

from collections.abc import Mapping

from evener.schema import Noun, Part
from evener.search.options import TuneConfig
from evener.search.study import Outcome
from evener.search.trials import SearchTrial


class TrialSummary(Part, frozen=True, kw_only=True):
    """One trial.

    Attributes:
        number: from 0.
        outcome: complete, pruned or failed; None if it was not over when the search ended.
        values: options that were drawn.
        scores: by epoch, from 1.
        score: the last of them.
        nodes: that worked on it, in that order.
        seconds: that they spent on it, summed.
        attempts: that ended with the death of a node.
        reason: why it failed or was pruned, where its scores do not say so.
    """

    number: int
    outcome: Outcome | None
    values: dict[str, str]
    scores: dict[int, float]
    score: float | None
    nodes: tuple[str, ...]
    seconds: float
    attempts: int = 0
    reason: str = ""


class SearchRecord(Noun, frozen=True, kw_only=True):
    """A search.

    Attributes:
        task: as the user named it.
        metric: of the scores.
        epochs: of a trial that is not pruned.
        seed: of what was drawn, and of every trial.
        trials: by number.
        best: number of the best one; None if none is complete.
        importances: how much of the scores' spread each varied option explains, summing to 1.
        seconds: that the search took, since it was last begun.
    """

    task: str
    metric: str
    epochs: int
    seed: int
    trials: tuple[TrialSummary, ...]
    best: int | None
    importances: dict[str, float]
    seconds: float


def record_of(
    config: TuneConfig,
    metric: str,
    epochs: int,
    trials: Mapping[int, SearchTrial],
    best: SearchTrial | None,
    importances: dict[str, float],
    seconds: float,
) -> SearchRecord:
    """The record of a search that is over."""
    return SearchRecord(
        task=config.task,
        metric=metric,
        epochs=epochs,
        seed=config.seed,
        trials=tuple(
            TrialSummary(
                number=trial.number,
                outcome=trial.outcome,
                values=trial.values,
                scores=trial.scores,
                score=trial.score,
                nodes=tuple(trial.nodes),
                seconds=trial.seconds,
                attempts=trial.attempts,
                reason=trial.reason,
            )
            for trial in trials.values()
        ),
        best=None if best is None else best.number,
        importances=importances,
        seconds=seconds,
    )
