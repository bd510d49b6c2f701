"""A search as people read it: a line a trial while it goes on; table, importances and a line to paste at its end."""

from __future__ import annotations

import shlex

from rich.table import Table

from evener.records.search_record import SearchRecord, TrialSummary
from evener.report.text import exact_percent, human_seconds, percent, table_of
from evener.search.options import TuneConfig
from evener.search.trials import SearchTrial


def trial_line(trial: SearchTrial, sentence: str, metric: str, best: SearchTrial | None) -> str:
    """What has become of a trial, and which is the best so far."""
    words = f"trial {trial.number} ({_values(trial.values)}): {sentence}"
    if trial.outcome is not None:
        words += f" after {trial.epochs} epochs on {', '.join(trial.nodes)}" if trial.epochs else ""
        words += f", {metric} {_score(trial.score, metric)}" if trial.score is not None else ""
        words += f"; {trial.reason}" if trial.reason else ""
        words += f"   best: trial {best.number}, {_score(best.score, metric)}" if best is not None else ""
    return words


def trials_table(record: SearchRecord) -> Table:
    """A row a trial."""
    return table_of(
        f"{len(record.trials)} trials of {record.task} in {human_seconds(record.seconds)}",
        {
            ">trial": lambda one: f"{one.number}{'*' if one.number == record.best else ''}",
            "outcome": lambda one: one.outcome or "not over",
            f">{record.metric}": lambda one: _score(one.score, record.metric),
            ">epochs": lambda one: str(max(one.scores, default=0)),
            ">seconds": lambda one: f"{one.seconds:.1f}",
            "nodes": lambda one: ", ".join(one.nodes),
            "values": _values_and_reason,
        },
        record.trials,
        caption="" if record.best is None else "*: the best",
    )


def importances_table(record: SearchRecord) -> Table:
    """How much each varied option matters."""
    return table_of(
        "what the scores' differences come from",
        {"option": lambda item: item[0], ">importance": lambda item: percent(item[1])},
        sorted(record.importances.items(), key=lambda item: -item[1]),
        caption="PED-ANOVA over the complete trials",
    )


def command_line(config: TuneConfig, record: SearchRecord) -> str:
    """What trains the best trial again, to paste."""
    assert record.best is not None
    words = ["evener", "train", config.task]
    for name, value in {**config.option, **record.trials[record.best].values}.items():
        words += ["--option", f"{name}={value}"]
    words += ["--epochs", str(record.epochs), "--seed", str(config.seed)]
    for option in ("data", "batch_size"):
        if (value := getattr(config, option)) is not None:
            words += ["--" + option.replace("_", "-"), str(value)]
    if config.precision != "fp32":
        words += ["--precision", config.precision]
    return shlex.join(words)


def _values(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _values_and_reason(one: TrialSummary) -> str:
    return _values(one.values) + (f"; {one.reason}" if one.reason else "")


def _short(value: str) -> str:
    """A number with four digits, any other value as it is."""
    try:
        return value if value.isdecimal() else f"{float(value):.4g}"
    except ValueError:
        return value


def _score(score: float | None, metric: str) -> str:
    if score is None:
        return "-"
    return exact_percent(score) if metric == "accuracy" else f"{score:.4f}"
