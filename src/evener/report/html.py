"""Records as one self-contained HTML file: no scripts, no fonts, no network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput, require
from evener.records.event_tail import EVENTS_FILE, EventTail
from evener.records.events import Phase
from evener.records.record import Step, TrainRecord
from evener.records.schema import read_noun
from evener.report.bars import comparison_figure, phases_figure, plan_figure
from evener.report.canvas import svg
from evener.report.figures import learning_figure, throughput_figure
from evener.report.live.live_run import OVER
from evener.report.style import PAGE_STYLE
from evener.report.tables import comparison_table, plan_table, predicted_table, record_table
from evener.report.text import exact_percent, grid, human_count, human_seconds, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
<h1>{title}</h1>
{body}
</main></body>
</html>
"""


def write_records(paths: Sequence[Path], output: Path) -> None:
    """Write one HTML page of the records in `paths` to `output`, for `evener report`."""
    records = {_label(path, paths): _read_record(path) for path in paths}
    write_page(output, records, title=", ".join(records))


def _read_record(path: Path) -> TrainRecord:
    """Return the record at `path`. Raise InvalidInput if its run has none yet, or MissingFile, InvalidFile."""
    if not path.exists() and (log := path.with_name(EVENTS_FILE)).exists():
        raise InvalidInput(f"{path.parent} holds no record.json to report: {_outcome(log)}")
    return read_noun(path, TrainRecord)


def _outcome(log: Path) -> str:
    """Return a clause that says how far the run of an event log came, and how it ended."""
    events = [event for moment in EventTail(log).read() for event in moment.events]
    phases = [event for event in events if isinstance(event, Phase)]
    steps = sum(isinstance(event, Step) for event in events)
    last = phases[-1] if phases else Phase(what="starting")
    words = f"{last.what}: {last.detail}" if last.detail else last.what
    if last.what in OVER:
        return f"the run ended {'after' if steps else 'before'} its first step ({words})"
    return f"the run has {'' if steps else 'made no step and '}not ended, or was killed; its last phase is {words}"


def _label(path: Path, others: Sequence[Path]) -> str:
    """Return a short name for a record: its folder's name if this is unique, else its path."""
    names = [other.resolve().parent.name for other in others]
    name = path.resolve().parent.name
    return name if names.count(name) == 1 else str(path)


def write_page(
    path: Path,
    records: Mapping[str, TrainRecord],
    title: str,
    summary: str = "",
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Write `records` to `path` as one HTML file with figures, tables, events, plans and environments.

    Args:
        path: of the file, which is written atomically.
        records: at least one, by name; several are also compared, with speed-ups over the first.
        title: title of the page.
        summary: conclusion in a sentence or two, shown above everything else.
        ranges: of the samples per second, see `comparison_figure`.

    Raises:
        InvalidValue: there are no records.
        MissingExtra: Matplotlib is not installed.
    """
    require(bool(records), "records", dict(records), "at least one")
    body = [f'<p class="summary">{escape(summary)}</p>'] if summary else []
    body += [
        _links(records),
        *_comparison(records, ranges),
        _figure(learning_figure(records), "loss and accuracy of every run"),
    ]
    for index, (name, record) in enumerate(records.items()):
        body += _run(index, name, record, is_alone=len(records) == 1)
    page = _PAGE.format(title=escape(title), style=PAGE_STYLE, body="\n".join(body))
    atomic_write(path, page.encode())


def _links(records: Mapping[str, TrainRecord]) -> str:
    if len(records) == 1:
        return ""
    links = (f'<a href="#run-{index}">{escape(name)}</a>' for index, name in enumerate(records))
    return f"<nav>{' '.join(links)}</nav>"


def _comparison(records: Mapping[str, TrainRecord], ranges: Mapping[str, tuple[float, float]] | None) -> list[str]:
    if len(records) == 1:
        return []
    figure = comparison_figure(records, ranges)
    return [_table(comparison_table(records)), _figure(figure, "samples per second of every run")]


def _run(index: int, name: str, record: TrainRecord, *, is_alone: bool) -> list[str]:
    """Return the sections of one run: results first, then its details.

    The details are folded where the page shows several runs.
    """
    return [
        f'<section><h2 id="run-{index}">{escape(name)}</h2>',
        f'<p class="facts">{escape(_facts(record))}</p>',
        _tiles(record),
        _table(record_table(record)),
        f"<details{' open' if is_alone else ''}><summary>Plan, phases, throughput, events and environment</summary>",
        _figure(phases_figure(record), f"{name}: where the nodes' time went"),
        _table(plan_table(record.plan)),
        _figure(plan_figure(record.plan), f"{name}: share of every node"),
        _table(predicted_table(record)),
        _figure(throughput_figure(record), f"{name}: samples per second"),
        _table(_events(record)),
        _table(_environment(record)),
        "</details>",
        "</section>",
    ]


def _facts(record: TrainRecord) -> str:
    nodes = "1 node" if len(record.nodes) == 1 else f"{len(record.nodes)} nodes"
    epochs = "1 epoch" if record.epochs == 1 else f"{record.epochs} epochs"
    return f"{record.task}: {nodes}, {record.plan.strategy}, {epochs}, {record.precision}, seed {record.seed}"


def _tiles(record: TrainRecord) -> str:
    loss = record.final_loss
    facts = {
        "training": human_seconds(record.seconds),
        "until the first step": human_seconds(record.startup_seconds),
        "samples per second": human_count(record.samples_per_second),
        "of the ideal": "-" if record.of_ideal is None else percent(record.of_ideal),
        "final loss": "-" if loss is None else human_count(loss),
        "validation accuracy": exact_percent(record.validation_accuracy),
        "goodput": exact_percent(record.goodput),
    }
    tiles = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{''.join(tiles)}</dl>"


def _events(record: TrainRecord) -> Table:
    rows = [(str(event.step), event.kind, event.message) for event in record.events]
    return grid("Events", (">step", "event", "what happened"), rows, caption="" if rows else "Nothing happened.")


def _environment(record: TrainRecord) -> Table:
    return grid("Environment", ("what", "version"), sorted(record.environment.items()))


def _figure(figure: Figure, description: str) -> str:
    data = base64.b64encode(svg(figure).encode()).decode()
    return f'<figure><img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}"></figure>'


_END = ' class="end"'


def _table(table: Table) -> str:
    """Render a table of `grid` as HTML."""
    classes = [' class="number"' if column.justify == "right" else "" for column in table.columns]
    head = "".join(f"<th{kind}>{_text(c.header)}</th>" for kind, c in zip(classes, table.columns, strict=True))
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = (
        f"<tr{_END if row.end_section else ''}>{_cells(cells, classes)}</tr>"
        for row, cells in zip(table.rows, rows, strict=True)
    )
    note = f'<p class="note">{_text(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="wide"><table><caption>{_text(table.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>{note}</div>"
    )


def _cells(cells: Iterable[object], classes: Iterable[str]) -> str:
    return "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(cells, classes, strict=True))


def _text(value: object) -> str:
    return escape(value.plain if isinstance(value, Text) else str(value or ""))
