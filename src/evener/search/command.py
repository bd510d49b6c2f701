"""`evener tune`: runs a search on nodes of this machine or of a master and shows the best trial."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evener.commands.dashboard import page_beside
from evener.records.errors import Interrupted
from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE, SearchRecord, TrialSummary
from evener.report.text import exact_percent, human_seconds, percent, table_of
from evener.search.assignments import Assignments
from evener.search.objective import Objective
from evener.search.options import TuneConfig
from evener.search.search import Search
from evener.search.study import Study, open_study
from evener.search.task_objective import task_objective
from evener.search.trial_folder import TrialFolder
from evener.search.trials import Rules, SearchTrial
from evener.system.signals import interrupt_on_stop_signals
from evener.training.console import locked_folder, open_console, print_line


def tune(config: TuneConfig, *, as_json: bool) -> None:
    """Search for options of a task, show the results, and write them to the study's folder.

    Raises:
        EvenerError: the configuration is invalid, or every trial fails with the same error.
        Interrupted: the user pressed Ctrl-C; the study can be resumed.
    """
    search_for(config, task_objective, as_json=as_json)


def search_for(config: TuneConfig, objective_of: Callable[[TuneConfig], Objective], *, as_json: bool) -> SearchRecord:
    """Search for the options of `objective_of(config)`, show the results, and return them. Raises like `tune`."""
    console = open_console(to_stderr=as_json)
    with locked_folder(config.folder) as folder:
        console.print(f"search in {folder}: {config.trials} trials")
        record = _search(config, objective_of(config), folder, console)
    _show(record, config, console)
    if as_json:
        print_line(json.dumps(_summary(record)))
    return record


def _search(config: TuneConfig, objective: Objective, folder: Path, console: Console) -> SearchRecord:
    """Perform the search in its folder, which this process alone writes; return its record."""
    file = StudyFile(folder, config, objective.metric, objective.epochs)
    rules = Rules(objective.epochs, config.prune, config.ahead, larger_is_better=objective.metric != "loss")
    try:
        with (
            open_study(
                folder,
                larger_is_better=rules.larger_is_better,
                seed=config.seed,
                learns=config.sampler == "tpe",
                resume=config.resume,
                first=objective.first,
            ) as study,
            page_beside(folder, config.dashboard),
            interrupt_on_stop_signals(),
        ):
            search = _run(config, objective, study, rules, console, file)
            return file.conclude(search, study.importances())
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; resume with the same command and --resume --output {folder}") from None


def _run(
    config: TuneConfig, objective: Objective, study: Study, rules: Rules, console: Console, file: StudyFile
) -> Search:
    """Run the search and return it."""

    def folder_of(number: int) -> TrialFolder:
        return objective.folder_of(study.folder / "trials" / f"{number:04d}")

    def notify(trial: SearchTrial, sentence: str) -> None:
        console.print(trial_line(trial, sentence, objective.metric, search.best))
        if trial.outcome is not None:
            objective.leave(file.record_of(search))

    with objective.open_runner(study.folder, console.print) as runner:
        nodes = ", ".join(node.name for node in runner.nodes())
        console.print(f"nodes: {nodes or 'none yet; waiting for nodes to join'}")
        search = Search(
            study=study,
            rules=rules,
            assignments=Assignments(rules.epochs, objective.batch_size),
            runner=runner,
            suggest=objective.suggest,
            folder_of=folder_of,
            config_of=lambda trial, plan: objective.config_of(trial, folder_of(trial.number), plan),
            score_of=objective.score_of,
            num_trials=config.trials,
            until=inf if config.hours is None else time.monotonic() + 3600 * config.hours,
            divides=config.divides,
            joins=config.join,
            notify=notify,
            on_change=file.show,
        )
        search.run()
    objective.leave(file.record_of(search))  # a killed search may not have left the last ones
    return search


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
    for option in ("data", "batch_size", "home", "master", "token_file"):
        if (value := getattr(config, option)) is not None:
            arguments += ["--" + option.replace("_", "-"), str(value)]
    if config.precision != "fp32":
        arguments += ["--precision", config.precision]
    if config.is_on_master and not config.is_yolo:
        arguments += ["--agreement", config.agreement or "sync"]
    if config.ship_data:
        arguments.append("--ship-data")
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
        metric: str,
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
        record = self.record_of(search)
        if self._written is None or record.trials != self._written.trials:
            self._written = record
            write_noun(record, self._path)

    def record_of(self, search: Search) -> SearchRecord:
        """Return the state of a search that is not over."""
        return self._record(search.trials, search.best, search.running, {}, is_over=False)

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
