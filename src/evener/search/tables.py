"""Output of a search: one line per event of a trial; at the end a table, importances and a command to paste."""

from __future__ import annotations

import shlex

from rich.table import Table

from evener.records.search_record import SearchRecord, TrialSummary
from evener.report.text import exact_percent, human_seconds, percent, table_of
from evener.search.options import TuneConfig
from evener.search.trials import SearchTrial


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
