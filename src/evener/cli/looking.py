"""`evener benchmark`, `trace`, `demo`, `report`, `version`: looking at machines, models and runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import Json, Memory, Patience, Speeds, options_of


def benchmark(
    task: Annotated[str | None, typer.Option(help="Also time this task's model by batch size.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data.")] = None,
    local_nodes: Speeds = None,
    devices: Annotated[str, typer.Option(help="all, cpu, or devices such as cuda:0,cuda:1.")] = "all",
    memory: Memory = None,
    output: Annotated[Path, typer.Option(help="File of the profile.")] = Path("cluster.json"),
    patience: Patience = 15.0,
    as_json: Json = False,
) -> None:
    """Measure every device and link, and write a ClusterProfile."""
    from evener.run import commands

    commands.benchmark(
        task=task,
        data_dir=str(data) if data else None,
        local_nodes=local_nodes,
        devices=devices,
        memory=memory,
        output=output,
        patience=patience,
        as_json=as_json,
        environment=os.environ,
    )


def trace(
    task: Annotated[str, typer.Argument(help="Built-in task, or path/to/my_task.py.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="key=value for the task; may be repeated.")] = None,
    output: Annotated[Path, typer.Option(help="File of the graph.")] = Path("graph.json"),
) -> None:
    """Show the layers of a task's model and what each costs, without computing anything; write a ModelGraph."""
    from evener.run import commands

    commands.show_graph(task, str(data) if data else None, options_of(option), output)


def demo(
    epochs: Annotated[int | None, typer.Option(help="Passes over the data in each of the three runs.")] = None,
    local_nodes: Speeds = "1.0,0.5,0.25",
    output: Annotated[Path, typer.Option(help="Folder of the picture, the page and the records.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train digits three ways on uneven local nodes: the best node alone, equal shares, Evener."""
    from evener.run.demo import demo as run_demo

    run_demo(epochs=epochs, speeds=local_nodes or "1.0,0.5,0.25", output=output, as_json=as_json)


def report(
    records: Annotated[list[Path], typer.Argument(help="One or more record.json.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page with tables and figures of one or several runs."""
    from evener.run import reporting

    reporting.report(records, output)
    sys.stdout.write(f"wrote {output}\n")


def version() -> None:
    """Print the versions of Evener and of what it stands on."""
    from evener.run import reporting

    sys.stdout.write(json.dumps(reporting.versions(), indent=1) + "\n")
