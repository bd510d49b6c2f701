"""`evener train`, `plan`, `benchmark`, `trace`, `report`, `demo` and `version`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.fields import Json, command_of, option_of, pairs
from evener.run.config import RunConfig
from evener.run.options import BenchmarkConfig, PlanConfig

_SPEEDS = "1.0,0.5,0.25"


def train(config: RunConfig, as_json: bool) -> None:
    """Train TASK on this machine, as a rank of torchrun, or (with --agreement) on the nodes of a master."""
    if config.agreement is not None:
        from evener.run.ps_train import train_on_master

        train_on_master(config, as_json=as_json)
    else:
        from evener.run import commands

        commands.train(config, as_json=as_json)


def plan(config: PlanConfig, as_json: bool) -> None:
    """Say what each way of training MODEL on some machines would cost, and which to take; needs no GPU."""
    from evener.run import plan_command

    plan_command.plan(config, as_json=as_json)


def benchmark(config: BenchmarkConfig, as_json: bool) -> None:
    """Measure every device and link, and write a ClusterProfile."""
    from evener.run import commands

    commands.benchmark(config, as_json=as_json)


def trace(
    task: Annotated[str, typer.Argument(help="Built-in task, or path/to/my_task.py.")],
    data: Annotated[Path | None, option_of(RunConfig, "data")] = None,
    option: Annotated[list[str] | None, option_of(RunConfig, "option")] = None,
    output: Annotated[Path, typer.Option(help="File of the graph.")] = Path("graph.json"),
) -> None:
    """Show the layers of a task's model and what each costs, without computing anything; write a ModelGraph."""
    from evener.run import commands

    commands.trace(task, data, pairs(option), output)


def demo(
    epochs: Annotated[int | None, typer.Option(help="Passes over the data in each of the three runs.")] = None,
    local_nodes: Annotated[str, option_of(RunConfig, "local_nodes")] = _SPEEDS,
    output: Annotated[Path, typer.Option(help="Folder of the picture, the page and the records.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train digits three ways on uneven local nodes: the best node alone, equal shares, Evener."""
    from evener.run import commands

    commands.demo(epochs=epochs, speeds=local_nodes, output=output, as_json=as_json)


def report(
    records: Annotated[list[Path], typer.Argument(help="One or more record.json.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page with tables and figures of one or several runs."""
    from evener.report.html import write_records

    write_records(records, output)
    sys.stdout.write(f"wrote {output}\n")


def version() -> None:
    """Print the versions of Evener and of what it stands on."""
    from evener.host import package_versions

    sys.stdout.write(json.dumps(package_versions(), indent=1) + "\n")


COMMANDS = (
    command_of(RunConfig, train),
    command_of(PlanConfig, plan),
    command_of(BenchmarkConfig, benchmark),
    trace,
    report,
    demo,
    version,
)
"""Options of the first three are the fields of a struct."""
