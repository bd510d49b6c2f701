"""SearchRecord: the results of a search, trial by trial; `study.json`, which is written during the search."""

from __future__ import annotations

from typing import Literal

from evener.records.schema import Noun, Part

STUDY_FILE = "study.json"
Outcome = Literal["complete", "pruned", "failed"]


class TrialSummary(Part, frozen=True, kw_only=True):
    """One trial.

    Attributes:
        number: number, from 0.
        outcome: complete, pruned or failed; None if it is not over.
        values: options that were drawn.
        scores: scores by epoch, from 1.
        score: last of them.
        nodes: nodes that have worked on it so far, in that order.
        seconds: seconds that they spent on it, summed.
        attempts: attempts that ended with the death of a node.
        reason: reason why it failed or was pruned, where its scores do not show it.
        is_running: whether nodes work on it now.
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
    is_running: bool = False


class SearchRecord(Noun, frozen=True, kw_only=True):
    """A search.

    Attributes:
        task: task, as the user named it.
        metric: metric of the scores.
        epochs: epochs of a trial that is not pruned.
        seed: seed of the draws, and of every trial.
        trials: trials by number.
        best: number of the best one; None if none is complete.
        importances: share of the scores' spread that each varied option explains, summing to 1.
        seconds: seconds of the search since it was last begun.
        wanted: requested trials; 0: as many as there are.
        is_over: whether no trial will begin or continue.
        usual: options that came from `evener.toml`, and that file; empty if none did.
    """

    task: str
    metric: str
    epochs: int
    seed: int
    trials: tuple[TrialSummary, ...]
    best: int | None
    importances: dict[str, float]
    seconds: float
    wanted: int = 0
    is_over: bool = True
    usual: str = ""
