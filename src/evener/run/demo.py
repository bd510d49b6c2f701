"""The demonstration: one task on uneven nodes three ways, with the same seed and number of epochs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from evener.atomic import atomic_write
from evener.launch.nodes import parse_local_nodes
from evener.record import TrainRecord
from evener.report.bars import comparison_figure
from evener.report.canvas import png, require_matplotlib
from evener.report.html import write_page
from evener.report.tables import comparison_table, summary
from evener.report.text import percent
from evener.run.commands import perform
from evener.run.config import RunConfig
from evener.run.console import open_console, print_line

WAYS = {"best_node_alone": "measured", "equal_shares": "equal", "evener": "measured"}


def demo(
    *, epochs: int | None, speeds: str, output: Path, as_json: bool, task: str = "digits"
) -> dict[str, TrainRecord]:
    """`evener demo`: train `task` on the best node alone, with equal shares, and with Evener's; compare.

    Args:
        epochs: of each run; None for the task's own.
        speeds: of the local nodes.
        output: folder of records, picture and page.
        as_json: print one object with the three summaries as the last line.
        task: built-in name or path.
    """
    require_matplotlib()
    nodes = parse_local_nodes(speeds)
    best = max(nodes, key=lambda node: node.speed_at(0))
    console = open_console(as_json)
    records = {}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for way, shares in WAYS.items():
        console.rule(way.replace("_", " "))
        config = RunConfig(task=task, output=output / f"{way}-{stamp}", shares=shares, epochs=epochs)
        records[way] = perform(config, [best] if way == "best_node_alone" else nodes, to_stderr=as_json)
    _show(records, console, output, ideal_factor=sum(n.speed_at(0) for n in nodes) / best.speed_at(0))
    if as_json:
        print_line(json.dumps({way: summary(record) for way, record in records.items()}))
    return records


def _show(records: dict[str, TrainRecord], console: Console, output: Path, ideal_factor: float) -> None:
    ideal = ideal_factor * records["best_node_alone"].samples_per_second
    reached = records["evener"].samples_per_second / ideal if ideal else 0.0
    titled = {way.replace("_", " "): record for way, record in records.items()}
    console.print(comparison_table(titled))
    console.print(f"evener reached {percent(reached)} of the ideal: {ideal_factor:.2f} times the best node alone")
    atomic_write(output / "demo.png", png(comparison_figure(titled, ideal=ideal)))
    write_page(output / "demo.html", titled, title="Evener: one model, uneven nodes")
    console.print(f"picture: {output / 'demo.png'}   page: {output / 'demo.html'}")
