"""Writes the record of a search to `study.json`, about once a second while it runs and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE, SearchRecord, TrialSummary
from evener.search.options import Metric, TuneConfig
from evener.search.search import Search
from evener.search.trials import SearchTrial

_WRITE_INTERVAL_S = 1.0


class StudyFile:
    """The file `study.json` of a search.

    Args:
        folder: folder of the study.
        config: configuration of the search.
        metric: metric of the scores.
        epochs: epochs of a trial that is not pruned.
        clock: returns seconds.
    """

    def __init__(
        self,
        folder: Path,
        config: TuneConfig,
        metric: Metric,
        epochs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._config, self._metric, self._epochs = folder / STUDY_FILE, config, metric, epochs
        self._clock, self._begun, self._due = clock, clock(), 0.0
        self._written: SearchRecord | None = None

    def show(self, search: Search) -> None:
        """Write the state of the search if it has changed and the last write was long enough ago."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _WRITE_INTERVAL_S
        record = self._record(search.trials, search.best, search.running, {}, is_over=False)
        if self._written is None or record.trials != self._written.trials:
            self._written = record
            write_noun(record, self._path)

    def conclude(self, search: Search, importances: dict[str, float]) -> SearchRecord:
        """Write the result of a search that is over, and return it."""
        record = self._record(search.trials, search.best, frozenset(), importances, is_over=True)
        write_noun(record, self._path)
        return record

    def _record(
        self,
        trials: Mapping[int, SearchTrial],
        best: SearchTrial | None,
        running: frozenset[int],
        importances: dict[str, float],
        *,
        is_over: bool,
    ) -> SearchRecord:
        return SearchRecord(
            task=self._config.task,
            metric=self._metric,
            epochs=self._epochs,
            seed=self._config.seed,
            trials=tuple(_summary(trial, trial.number in running) for trial in trials.values()),
            best=None if best is None else best.number,
            importances=importances,
            seconds=self._clock() - self._begun,
            wanted=self._config.trials,
            is_over=is_over,
            usual=self._config.usual,
        )


def _summary(trial: SearchTrial, is_running: bool) -> TrialSummary:
    return TrialSummary(
        number=trial.number,
        outcome=trial.outcome,
        values=trial.values,
        scores=dict(trial.scores),
        score=trial.score,
        nodes=tuple(trial.nodes),
        seconds=trial.seconds,
        attempts=trial.lost_attempts,
        reason=trial.reason,
        is_running=is_running,
    )
