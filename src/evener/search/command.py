"""`evener tune`: from what is asked for to the best trial, on nodes of this machine or of a master."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from evener.commands.backends import is_thin
from evener.commands.dashboard import page_beside
from evener.data.tasks.load import blaming, import_file, is_path, load_any_task, load_thin_task
from evener.records.errors import EvenerError, Interrupted, InvalidInput, TrainingFailed
from evener.records.record import Epoch
from evener.records.search_record import SearchRecord
from evener.records.task import BatchTask, Task, ThinTask
from evener.search.assignments import Board
from evener.search.backends import open_runs, run_config
from evener.search.options import Metric, TuneConfig
from evener.search.search import Search
from evener.search.space import Suggest, options_of, parse_varied, suggest_varied
from evener.search.study import Study, open_study, some_values
from evener.search.study_file import StudyFile
from evener.search.tables import command_line, importances_table, trial_line, trials_table
from evener.search.trial_folder import TrialFolder
from evener.search.trials import Rules, SearchTrial
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import open_console, print_line, run_folder

_TRIES = 5
"""Draws of options with which a task is made to see what it is: some may be such that its code fails."""


class _Facts(NamedTuple):
    """Of the task: epochs and samples of a step of every trial, and what it is judged by."""

    epochs: int
    batch_size: int
    metric: Metric


def tune(config: TuneConfig, *, as_json: bool) -> None:
    """Search, show what comes of it, and write it down.

    Raises:
        EvenerError: what was asked for cannot be done, or every trial ends by the same error.
        Interrupted: Ctrl-C; the study can be gone on with.
    """
    console = open_console(to_stderr=as_json)
    with _tentative_folder(config.folder) as folder:
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
            record = file.conclude(search, study.importances())
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; the same command with --resume --output {folder} goes on") from None
    _show(record, config, console)
    if as_json:
        print_line(json.dumps(_summary(record)))


@contextmanager
def _tentative_folder(folder: Path) -> Iterator[Path]:
    """As `run_folder`; if what is asked for turns out to be wrong inside, a folder that was made for it goes again."""
    is_new = not folder.exists()
    try:
        yield run_folder(folder)
    except EvenerError:
        if is_new and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _search(
    config: TuneConfig,
    study: Study,
    rules: Rules,
    suggest: Suggest,
    facts: _Facts,
    console: Console,
    file: StudyFile,
) -> Search:
    """The search, when it is over."""
    metric = facts.metric

    def folder_of(number: int) -> TrialFolder:
        return TrialFolder(study.folder / "trials" / f"{number:04d}")

    def tell(trial: SearchTrial, sentence: str) -> None:
        console.print(trial_line(trial, sentence, metric, search.best))

    with open_runs(config, study.folder, console.print) as runs:
        nodes = ", ".join(node.name for node in runs.nodes())
        console.print(f"on {nodes or 'nodes that have yet to come'}")
        search = Search(
            study=study,
            rules=rules,
            board=Board(rules.epochs, facts.batch_size),
            runs=runs,
            suggest=suggest,
            folder_of=folder_of,
            config_of=lambda trial, plan: run_config(config, rules.epochs, trial, folder_of(trial.number), plan),
            score_of=lambda epoch: score_of(epoch, metric),
            num_trials=config.trials,
            until=inf if config.hours is None else time.monotonic() + 3600 * config.hours,
            divides=config.divides,
            joins=config.join,
            tell=tell,
            watch=file.show,
        )
        search.run()
    return search


def score_of(epoch: Epoch, metric: Metric) -> float:
    """The score of an epoch. Raises InvalidInput: the task does not tell it."""
    validation = epoch.validation
    found = epoch.loss if validation is None else validation.loss
    if metric == "accuracy":
        found = None if validation is None else validation.accuracy
    if found is None:
        raise InvalidInput(f"--metric {metric}: this task does not tell it; take the other one")
    return found


def _suggest(config: TuneConfig) -> Suggest:
    """What draws options: of the command line, or of the task's file. Raises InvalidInput: nothing is varied."""
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
            found = space(trial)
        return options_of(found, str(path))

    return suggest


def _facts(config: TuneConfig, suggest: Suggest) -> _Facts:
    """What a search has to know of its task. Raises EvenerError: the task is wrong, whatever its options."""
    for number in range(_TRIES):
        try:
            return _facts_with(config, some_values(suggest, config.seed, number))
        except TrainingFailed:
            if number == _TRIES - 1 or not config.vary:
                raise
    raise AssertionError


def _facts_with(config: TuneConfig, values: dict[str, str]) -> _Facts:
    """The same for a task with these options."""
    options = {**config.option, **values}
    if config.thin or (config.is_on_master and is_thin(config.task)):
        thin = load_thin_task(config.task, config.data, options)
        has_accuracy = thin.has_accuracy and thin.validation_data is not None
        return _facts_of(config, thin, has_accuracy)
    task = load_any_task(config.task, config.data, options)
    if isinstance(task, BatchTask):
        raise InvalidInput("a search needs a Task, which can stop and go on elsewhere; a BatchTask cannot")
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
            f"best: trial {record.best}. To train it again:\n  {command_line(config, record)}", soft_wrap=True
        )
    console.print(f"study.json and journal.log, which optuna-dashboard opens, are in {config.folder}")


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
