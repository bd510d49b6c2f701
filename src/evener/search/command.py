"""`evener tune`: runs a search on nodes of this machine or of a master and shows the best trial."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from evener.commands.dashboard import page_beside
from evener.commands.engines import is_thin
from evener.data.tasks.load import blaming, import_file, is_path, load_any_task, load_thin_task
from evener.records.errors import Interrupted, InvalidInput, TrainingFailed
from evener.records.record import Epoch
from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE, SearchRecord, TrialSummary
from evener.records.task import BatchTask, Task, ThinTask
from evener.report.text import exact_percent, human_seconds, percent, table_of
from evener.search.assignments import Assignments
from evener.search.options import Metric, TuneConfig
from evener.search.runners import open_runner, run_config
from evener.search.search import Search
from evener.search.space import Suggest, options_of, parse_varied, suggest_varied
from evener.search.study import Study, open_study, some_values
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

    with open_runner(config, study.folder, console.print) as runner:
        nodes = ", ".join(node.name for node in runner.nodes())
        console.print(f"nodes: {nodes or 'none yet; waiting for nodes to join'}")
        search = Search(
            study=study,
            rules=rules,
            assignments=Assignments(rules.epochs, facts.batch_size),
            runner=runner,
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


def trial_line(trial: SearchTrial, sentence: str, metric: str, best: SearchTrial | None) -> str:
    """Return what happened to a trial, and the best trial so far."""
    line = f"trial {trial.number} ({_values(trial.values)}): {sentence}"
    if trial.outcome is not None:
        line += f" after {trial.epochs} epochs on {', '.join(trial.nodes)}" if trial.epochs else ""
        line += f", {metric} {_score(trial.score, metric)}" if trial.score is not None else ""
        line += f"; {trial.reason}" if trial.reason else ""
        line += f"   best: trial {best.number}, {_score(best.score, metric)}" if best is not None else ""
    return line


def trials_table(record: SearchRecord) -> Table:
    """Return a table with one row per trial."""
    return table_of(
        f"{len(record.trials)} trials of {record.task} in {human_seconds(record.seconds)}",
        {
            ">trial": lambda trial: f"{trial.number}{'*' if trial.number == record.best else ''}",
            "outcome": lambda trial: trial.outcome or "unfinished",
            f">{record.metric}": lambda trial: _score(trial.score, record.metric),
            ">epochs": lambda trial: str(max(trial.scores, default=0)),
            ">seconds": lambda trial: f"{trial.seconds:.1f}",
            "nodes": lambda trial: ", ".join(trial.nodes),
            "values": _values_and_reason,
        },
        record.trials,
        caption="" if record.best is None else "*: the best",
    )


def importances_table(record: SearchRecord) -> Table:
    """Return a table of how much each varied option matters."""
    return table_of(
        "importance of options",
        {"option": lambda item: item[0], ">importance": lambda item: percent(item[1])},
        sorted(record.importances.items(), key=lambda item: -item[1]),
        caption="PED-ANOVA over the complete trials",
    )


def command_line(config: TuneConfig, record: SearchRecord) -> str:
    """Return the command that trains the best trial again."""
    assert record.best is not None
    arguments = ["evener", "train", config.task]
    for name, value in {**config.option, **record.trials[record.best].values}.items():
        arguments += ["--option", f"{name}={value}"]
    arguments += ["--epochs", str(record.epochs), "--seed", str(config.seed)]
    for option in ("data", "batch_size"):
        if (value := getattr(config, option)) is not None:
            arguments += ["--" + option.replace("_", "-"), str(value)]
    if config.precision != "fp32":
        arguments += ["--precision", config.precision]
    return shlex.join(arguments)


def _values(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _values_and_reason(trial: TrialSummary) -> str:
    return _values(trial.values) + (f"; {trial.reason}" if trial.reason else "")


def _short(value: str) -> str:
    """Return a number with four digits, and any other value unchanged."""
    try:
        return value if value.isdecimal() else f"{float(value):.4g}"
    except ValueError:
        return value


def _score(score: float | None, metric: str) -> str:
    if score is None:
        return "-"
    return exact_percent(score) if metric == "accuracy" else f"{score:.4f}"


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
            trials=tuple(_summary_of_study(trial, trial.number in running) for trial in trials.values()),
            best=None if best is None else best.number,
            importances=importances,
            seconds=self._clock() - self._begun,
            wanted=self._config.trials,
            is_over=is_over,
            usual=self._config.usual,
        )


def _summary_of_study(trial: SearchTrial, is_running: bool) -> TrialSummary:
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
