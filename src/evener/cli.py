"""The command line: parse, call one function, print. PyTorch is imported only by what needs it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from evener.errors import EvenerError, InvalidValue, MissingExtra

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains one PyTorch model on uneven machines.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Speeds = Annotated[
    str | None,
    typer.Option(help="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
]
Memory = Annotated[str | None, typer.Option(help="Memory of every node, such as 4GB or 4GB,512MB.")]
Patience = Annotated[float, typer.Option(help="Seconds of silence after which a node is given up.")]


def main() -> None:
    """Run the command line; errors of Evener are one sentence and an exit code."""
    try:
        code = app(standalone_mode=False)
    except EvenerError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail("this needs PyTorch, which is not installed: pip install 'evener[torch]'", MissingExtra.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 130)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            _fail(error.format_message() if hasattr(error, "format_message") else str(error), 2)
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str, code: int) -> None:
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()
    sys.exit(code)


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="digits, mnist, tiny-imagenet, synthetic, or path/to/my_task.py.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="key=value for the task; may be repeated.")] = None,
    local_nodes: Speeds = None,
    devices: Annotated[str, typer.Option(help="all, cpu, or devices such as cuda:0,cuda:1.")] = "all",
    memory: Memory = None,
    strategy: Annotated[str, typer.Option(help="auto or data.")] = "auto",
    shares: Annotated[str, typer.Option(help="measured, equal, or relative shares such as 7,2,1.")] = "measured",
    batch_size: Annotated[int | None, typer.Option(help="Samples of one step over all nodes.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, order of samples and random transforms.")] = 0,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of one step.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes per node that load data ahead.")] = 0,
    stationary: Annotated[
        bool, typer.Option("--stationary", help="Every node keeps to a class-balanced part of the data of its own.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints; OUTPUT/checkpoints by default.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints besides every epoch's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of record, report and weights; runs/TASK-TIME.")] = None,
    patience: Patience = 15.0,
    as_json: Json = False,
) -> None:
    """Train TASK on this machine: alone, on all its devices, on local nodes, or as a rank of torchrun."""
    from evener.journey import commands
    from evener.journey.order import Order

    commands.check_strategy(strategy)
    order = Order(
        task=task,
        data_dir=str(data) if data else None,
        options=_options(option or []),
        output=commands.make_output(task, str(output) if output else None),
        shares=shares,
        batch_size=batch_size,
        epochs=epochs,
        precision=precision,
        compile=compile,
        seed=seed,
        accumulate=accumulate,
        workers=workers,
        stationary=stationary,
        checkpoint=str(checkpoint) if checkpoint else None,
        checkpoint_every=checkpoint_every,
        resume=resume,
        patience=patience,
        started=time.time(),
    )
    commands.train(
        order, local_nodes=local_nodes, devices=devices, memory=memory, as_json=as_json, environment=os.environ
    )


@app.command()
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
    from evener.journey import commands

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


@app.command()
def trace(
    task: Annotated[str, typer.Argument(help="Built-in task, or path/to/my_task.py.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="key=value for the task; may be repeated.")] = None,
    output: Annotated[Path, typer.Option(help="File of the graph.")] = Path("graph.json"),
) -> None:
    """Show the layers of a task's model and what each costs, without computing anything; write a ModelGraph."""
    from evener.journey import commands

    commands.show_graph(task, str(data) if data else None, _options(option or []), output)


@app.command()
def demo(
    epochs: Annotated[int | None, typer.Option(help="Passes over the data in each of the three runs.")] = None,
    local_nodes: Speeds = "1.0,0.5,0.25",
    output: Annotated[Path, typer.Option(help="Folder of the picture, the page and the records.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Train digits three ways on uneven local nodes: the best node alone, equal shares, Evener."""
    from evener.journey.demo import demo as run_demo

    run_demo(epochs=epochs, speeds=local_nodes or "1.0,0.5,0.25", output=output, as_json=as_json)


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="One or more record.json.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page with tables and figures of one or several runs."""
    from evener.journey import reporting

    reporting.report(records, output)
    sys.stdout.write(f"wrote {output}\n")


@app.command()
def version() -> None:
    """Print the versions of Evener and of what it stands on."""
    from evener.journey import reporting

    sys.stdout.write(json.dumps(reporting.versions(), indent=1) + "\n")


def _options(items: list[str]) -> dict[str, str]:
    pairs: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise InvalidValue("--option", item, "key=value")
        pairs[key] = value
    return pairs
