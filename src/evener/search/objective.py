"""The objective of a search: how it draws options, runs trials and scores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.records.plan import Plan
from evener.records.record import Epoch
from evener.records.search_record import SearchRecord
from evener.search.local_runner import TrialRunner
from evener.search.space import Suggest
from evener.search.trial_folder import TrialFolder
from evener.search.trials import SearchTrial

Notify = Callable[[str], None]


def _leave_nothing(_record: SearchRecord) -> None:
    """Leave no files besides those of the search."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a search: of a task (`task_objective`), or of a model of Ultralytics.

    Attributes:
        suggest: draws options.
        epochs: epochs of a trial that is not pruned.
        batch_size: samples of a step of a trial.
        metric: metric of the scores: accuracy, loss or fitness.
        open_runner: returns the runner of the trials, given the folder of the study and a function that shows messages.
        config_of: returns the configuration of a trial's run, which several nodes share by the plan, if there is one.
        score_of: returns the score of an epoch.
        folder_of: returns the folder of a trial, by its path.
        first: options of the first trial that are not drawn, by name.
        leave: writes files about the trials that are over; called after every trial.
    """

    suggest: Suggest
    epochs: int
    batch_size: int
    metric: str
    open_runner: Callable[[Path, Notify], AbstractContextManager[TrialRunner]]
    config_of: Callable[[SearchTrial, TrialFolder, Plan | None], Any]
    score_of: Callable[[Epoch], float]
    folder_of: Callable[[Path], TrialFolder] = TrialFolder
    first: Mapping[str, Any] = field(default_factory=dict)
    leave: Callable[[SearchRecord], None] = _leave_nothing
