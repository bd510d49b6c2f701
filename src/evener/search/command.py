"""`evener tune`: runs a search on nodes of this machine or of a master and shows the best trial."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from evener.commands.backends import is_thin
from evener.commands.dashboard import page_beside
from evener.data.tasks.load import blaming, import_file, is_path, load_any_task, load_thin_task
from evener.records.errors import Interrupted, InvalidInput, TrainingFailed
from evener.records.record import Epoch
from evener.records.search_record import SearchRecord
from evener.records.task import BatchTask, Task, ThinTask
from evener.search.assignments import Assignments
from evener.search.backends import open_backend, run_config
from evener.search.options import Metric, TuneConfig
from evener.search.search import Search
from evener.search.space import Suggest, options_of, parse_varied, suggest_varied
from evener.search.study import Study, open_study, some_values
from evener.search.study_file import StudyFile
from evener.search.tables import command_line, importances_table, trial_line, trials_table
from evener.search.trial_folder import TrialFolder
from evener.search.trials import Rules, SearchTrial
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import locked_folder, open_console, print_line

_MAX_DRAWS = 5
"""Draws of options with which the task is loaded to inspect it: some draws may make its code fail."""


class _Facts(NamedTuple):
    """Epochs and samples per step of every trial of the task, and the metric that ranks trials."""

    epochs: int
    batch_size: int
    metric: Metric


def tune(config: TuneConfig, *, as_json: bool) -> None:
    """Run the search, show its results, and write them to the study's folder.

    Raises:
        EvenerError: the configuration is invalid, or every trial fails with the same error.
        Interrupted: the user pressed Ctrl-C; the study can be resumed.
    """
    console = open_console(to_stderr=as_json)
    with locked_folder(config.folder) as folder:
        record = _tune(config, folder, console)
    _show(record, config, console)
    if as_json:
        print_line(json.dumps(_summary(record)))


def _tune(config: TuneConfig, folder: Path, console: Console) -> SearchRecord:
    """Perform the search in its folder, which this process alone writes; return its record."""
    console.print(f"search in {folder}: {config.trials} trials")
    suggest = _suggest(config)
    facts = _facts(config, suggest)
    file = StudyFile(folder, config, facts.metric, facts.epochs)
    rules = Rules(facts.epochs, config.prune, config.ahead, larger_is_better=facts.metric == "accuracy")
    try:
        with (
            open_study(
                folder,
                larger_is_better=rules.larger_is_better,
                seed=config.seed,
                learns=config.sampler == "tpe",
                resume=config.resume,
            ) as study,
            page_beside(folder, config.dashboard),
            interrupt_on_stop_signals(),
        ):
            search = _search(config, study, rules, suggest, facts, console, file)
            return file.conclude(search, study.importances())
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; resume with the same command and --resume --output {folder}") from None


def _search(
    config: TuneConfig,
    study: Study,
    rules: Rules,
    suggest: Suggest,
    facts: _Facts,
    console: Console,
    file: StudyFile,
) -> Search:
    """Run the search and return it."""
    metric = facts.metric

    def folder_of(number: int) -> TrialFolder:
        return TrialFolder(study.folder / "trials" / f"{number:04d}")

    def notify(trial: SearchTrial, sentence: str) -> None:
        console.print(trial_line(trial, sentence, metric, search.best))

    with open_backend(config, study.folder, console.print) as backend:
        nodes = ", ".join(node.name for node in backend.nodes())
        console.print(f"nodes: {nodes or 'none yet; waiting for nodes to join'}")
        search = Search(
            study=study,
            rules=rules,
            assignments=Assignments(rules.epochs, facts.batch_size),
            backend=backend,
            suggest=suggest,
            folder_of=folder_of,
            config_of=lambda trial, plan: run_config(config, rules.epochs, trial, folder_of(trial.number), plan),
            score_of=lambda epoch: score_of(epoch, metric),
            num_trials=config.trials,
            until=inf if config.hours is None else time.monotonic() + 3600 * config.hours,
            divides=config.divides,
            joins=config.join,
            notify=notify,
            on_change=file.show,
        )
        search.run()
    return search


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


def _show(record: SearchRecord, config: TuneConfig, console: Console) -> None:
    console.print(trials_table(record))
    if record.importances:
        console.print(importances_table(record))
    if record.best is None:
        console.print("no trial was completed")
    else:
        console.print(
            f"best: trial {record.best}. To train it again, run:\n  {command_line(config, record)}", soft_wrap=True
        )
    console.print(f"The folder {config.folder} holds study.json, and journal.log for optuna-dashboard.")


def _summary(record: SearchRecord) -> dict[str, object]:
    best = None if record.best is None else record.trials[record.best]
    return {
        "trials": len(record.trials),
        "best": record.best,
        "score": None if best is None else best.score,
        "values": None if best is None else best.values,
        "metric": record.metric,
        "seconds": record.seconds,
    }
