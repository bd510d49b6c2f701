"""The objective of a search for options of a task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evener.commands.engines import is_thin
from evener.data.tasks.load import blaming, import_file, is_path, load_any_task, load_thin_task
from evener.records.errors import InvalidInput, TrainingFailed
from evener.records.record import Epoch
from evener.records.task import BatchTask, Task, ThinTask
from evener.search.objective import Objective
from evener.search.options import Metric, TuneConfig
from evener.search.runners import open_runner, run_config
from evener.search.space import Suggest, options_of, parse_varied, suggest_varied
from evener.search.study import some_values

_MAX_DRAWS = 5
"""Draws of options with which the task is loaded to inspect it: some draws may make its code fail."""


class _Facts(NamedTuple):
    """Epochs and samples per step of every trial of the task, and the metric that ranks trials."""

    epochs: int
    batch_size: int
    metric: Metric


def task_objective(config: TuneConfig) -> Objective:
    """Return the objective of a search for options of the task of `config`.

    Raises:
        EvenerError: nothing is varied, or the task fails with all drawn options.
    """
    suggest = _suggest(config)
    facts = _facts(config, suggest)
    return Objective(
        suggest=suggest,
        epochs=facts.epochs,
        batch_size=facts.batch_size,
        metric=facts.metric,
        open_runner=partial(open_runner, config),
        config_of=partial(run_config, config, facts.epochs),
        score_of=partial(score_of, metric=facts.metric),
    )


def score_of(epoch: Epoch, metric: Metric) -> float:
    """Return the score of an epoch. Raises InvalidInput if the task does not compute the metric."""
    validation = epoch.validation
    score = epoch.loss if validation is None else validation.loss
    if metric == "accuracy":
        score = None if validation is None else validation.accuracy
    if score is None:
        raise InvalidInput(f"--metric {metric}: this task does not compute it; use the other metric")
    return score


def _suggest(config: TuneConfig) -> Suggest:
    """Return the function that draws options, from the command line or the task's file. Raises InvalidInput without
    one.
    """
    if config.vary:
        return suggest_varied([parse_varied(text) for text in config.vary])
    space: Callable[..., object] | None = None
    if is_path(config.task):
        path = Path(config.task).resolve()
        space = getattr(import_file(path), "space", None)
    if space is None:
        raise InvalidInput(
            "nothing is varied: give --vary lr=1e-4..1e-1:log, or define space(trial) in the task's file"
        )

    def suggest(trial: object) -> dict[str, str]:
        with blaming(path):
            options = space(trial)
        return options_of(options, str(path))

    return suggest


def _facts(config: TuneConfig, suggest: Suggest) -> _Facts:
    """Return the task's facts. Raises EvenerError if the task fails with all drawn options."""
    for number in range(_MAX_DRAWS):
        try:
            return _facts_with(config, some_values(suggest, config.seed, number))
        except TrainingFailed:
            if number == _MAX_DRAWS - 1 or not config.vary:
                raise
    raise AssertionError


def _facts_with(config: TuneConfig, values: dict[str, str]) -> _Facts:
    """Return the facts of the task with these options."""
    options = {**config.option, **values}
    if config.thin or (config.is_on_master and is_thin(config.task)):
        thin = load_thin_task(config.task, config.data, options)
        has_accuracy = thin.has_accuracy and thin.validation_data is not None
        return _facts_of(config, thin, has_accuracy)
    task = load_any_task(config.task, config.data, options)
    if isinstance(task, BatchTask):
        raise InvalidInput("a search needs a Task, which can pause and continue on another node; a BatchTask cannot")
    has_accuracy = task.correct is not None and task.validation_data is not None
    return _facts_of(config, task, has_accuracy)


def _facts_of(config: TuneConfig, task: Task | ThinTask, has_accuracy: bool) -> _Facts:
    usual: Metric = "accuracy" if has_accuracy else "loss"
    return _Facts(config.epochs or task.epochs, config.batch_size or task.batch_size, config.metric or usual)
