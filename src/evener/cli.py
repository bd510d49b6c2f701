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

experiment = typer.Typer(no_args_is_help=True, help="Published experiments, done again.")
app.add_typer(experiment, name="experiment")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Speeds = Annotated[
    str | None,
    typer.Option(help="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
]
Memory = Annotated[str | None, typer.Option(help="Memory of every node, such as 4GB or 4GB,512MB.")]
Home = Annotated[Path | None, typer.Option(help="Folder of the master; $EVENER_HOME, or ~/.local/state/evener.")]
Master = Annotated[str | None, typer.Option(help="Address of the master, if it is not that of this machine's home.")]
Token = Annotated[str | None, typer.Option(help="Of that master, as `evener up` printed it.")]
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
    strategy: Annotated[
        str,
        typer.Option(help="auto, data, filter, channel, hybrid, sharded, spatial, pipeline, or data+ one of them."),
    ] = "auto",
    replicas: Annotated[
        str | None, typer.Option(help="Of data+...: nodes that hold one model together, such as 3,2; two halves.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Of pipelines: parts of a batch that follow each other; 4 a stage.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Of pipelines: 1f1b or gpipe.")] = "1f1b",
    rematerialise: Annotated[
        str,
        typer.Option(help="Of divided models: compute activations twice to save memory: auto, never, always ..."),
    ] = "auto",
    plan: Annotated[Path | None, typer.Option(help="Perform this plan, as `evener plan --save` wrote it.")] = None,
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
    agreement: Annotated[
        str | None, typer.Option(help="Train on a master's nodes: sync, async, bounded, average or diloco.")
    ] = None,
    staleness: Annotated[int | None, typer.Option(help="Of bounded: updates that a node may be ahead.")] = None,
    local_steps: Annotated[
        str | None, typer.Option(help="Of average and diloco: steps between exchanges, or epoch.")
    ] = None,
    outer_lr: Annotated[float | None, typer.Option(help="Of diloco: learning rate of the common weights.")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="Of diloco: their Nesterov momentum.")] = None,
    compress: Annotated[str | None, typer.Option(help="With --agreement: none, bf16 or int8.")] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Of average and diloco: work on while an exchange is under way.")
    ] = False,
    ship_data: Annotated[bool, typer.Option("--ship-data", help="With --agreement: send --data to the nodes.")] = False,
    home: Home = None,
    master: Master = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Train TASK on this machine, as a rank of torchrun, or (with --agreement) on the nodes of a master."""
    from evener.journey import commands, star_options
    from evener.journey.order import Order
    from evener.journey.star_options import Way, Where

    way = Way(
        protocol=agreement,
        staleness=staleness,
        local_steps=local_steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
        overlap=overlap,
    )
    star_options.check_way(way)
    order = Order(
        task=task,
        data_dir=str(data) if data else None,
        options=_options(option or []),
        output=commands.make_output(task, str(output) if output else None),
        strategy=strategy,
        replicas=replicas,
        micro_batches=micro_batches,
        schedule=schedule,
        rematerialise=rematerialise,
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
    where = Where(local_nodes, _home(home), master, token, ship_data)
    if agreement is not None:
        from evener.journey.star_train import train_on_star

        star_options.refuse_collective(order, plan=plan, devices=devices, memory=memory)
        train_on_star(order, way, where, as_json=as_json)
        return
    star_options.refuse_star(where, home=home)
    commands.train(
        order,
        plan=plan,
        local_nodes=local_nodes,
        devices=devices,
        memory=memory,
        as_json=as_json,
        environment=os.environ,
    )


@app.command()
def up(
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT, or :PORT for all interfaces; as the last time, or :7117.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without encryption.")] = False,
    home: Home = None,
    patience: Annotated[
        float | None, typer.Option(help="Seconds of silence after which a node is given up; as the last time, or 15.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Be a master that nodes join, until `evener down` or Ctrl-C; started again it is the same one."""
    from evener.journey import star_nodes

    star_nodes.up(listen=listen, insecure=insecure, home=_home(home), patience=patience, as_json=as_json)


@app.command()
def join(
    address: Annotated[str, typer.Argument(help="Of the master, as `evener up` printed it.")],
    token: Annotated[str, typer.Option(help="As `evener up` printed it.")],
    name: Annotated[str | None, typer.Option(help="Of this node; the machine's by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or a device such as cuda:0; the best by default.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data on this node.")] = None,
    speed: Annotated[float, typer.Option(help="Below 1: slow this node down, for tests.")] = 1.0,
    cache: Annotated[Path | None, typer.Option(help="Folder for code and data that are sent to this node.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The master runs without encryption.")] = False,
    thin: Annotated[bool, typer.Option("--thin", help="Compute without PyTorch, even if it is installed.")] = False,
) -> None:
    """Be a node of the master at ADDRESS, until it says goodbye or Ctrl-C. Needs no PyTorch to join."""
    from evener.journey import star_nodes

    star_nodes.join(
        address=address,
        token=token,
        name=name,
        device=device,
        data=data,
        speed=speed,
        cache=cache,
        insecure=insecure,
        thin=thin,
        environment=os.environ,
    )


@app.command()
def nodes(home: Home = None, master: Master = None, token: Token = None, as_json: Json = False) -> None:
    """Show the nodes of a master, and the run that goes on."""
    from evener.journey import star_nodes

    star_nodes.nodes(home=_home(home), master=master, token=token, as_json=as_json)


@app.command()
def down(home: Home = None, master: Master = None, token: Token = None) -> None:
    """End a master's run, its nodes, and the master."""
    from evener.journey import star_nodes

    star_nodes.down(home=_home(home), master=master, token=token)


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


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="resnet152, vgg16 ... (see docs/oracle.md), graph.json, or a task.")],
    option: Annotated[
        list[str] | None, typer.Option(help="key=value for the network or task; may be repeated.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="A ClusterProfile; cluster.json by default.")] = None,
    machines: Annotated[str | None, typer.Option(help="Machines to imagine instead, such as 4xv100-node,h200.")] = None,
    network: Annotated[str, typer.Option(help="That joins them: 1gbe, 10gbe, 100gbe or infiniband.")] = "10gbe",
    devices: Annotated[str, typer.Option(help="Nodes of the profile to take, such as ada,bob; all by default.")] = "",
    batch_size: Annotated[int | None, typer.Option(help="Samples of one step; the task's, or 32 a device.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adam.")] = "momentum",
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    strategy: Annotated[list[str] | None, typer.Option(help="Look at this one only; may be repeated.")] = None,
    learn: Annotated[
        list[Path] | None, typer.Option(help="record.json of a past run to correct the profile by.")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Curves over numbers of devices, such as 1..1024.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan (or, with --scale, the picture) there.")] = None,
    as_json: Json = False,
) -> None:
    """Say what each way of training MODEL on some machines would cost, and which to take; needs no GPU."""
    from evener.journey import planning

    question = planning.Question(
        model=model,
        options=_options(option or []),
        profile=profile,
        machines=machines,
        network=network,
        devices=[name for name in devices.split(",") if name],
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,  # type: ignore[arg-type]  # is checked there
        strategies=tuple(strategy or ()),  # type: ignore[arg-type]  # likewise
        learn=learn or [],
    )
    planning.plan(question, save=save, scale=scale, as_json=as_json)


@experiment.command("oracle-abci")
def experiment_oracle_abci(csv: Annotated[Path, typer.Option(help="File to write.")] = Path("oracle-abci.csv")) -> None:
    """Predict the iterations of the published measurements on up to 1024 V100s."""
    from evener.journey import planning

    planning.oracle_abci(csv)


@experiment.command("nfnn")
def experiment_nfnn(
    data: Annotated[Path | None, typer.Option(help="Folder of MNIST's IDX files; data/mnist by default.")] = None,
    updates: Annotated[int, typer.Option(help="Of the common weights, in every run.")] = 5000,
    workers: Annotated[str, typer.Option(help="Numbers of workers, such as 1,2,3.")] = "1,2,3",
    mode: Annotated[str, typer.Option(help="sync, async or sync,async.")] = "sync,async",
    repeat: Annotated[int, typer.Option(help="Runs of every cell.")] = 5,
    seed: Annotated[int, typer.Option(help="Of weights and order of samples; 9 comes nearest to the published.")] = 9,
    output: Annotated[Path, typer.Option(help="Folder of table and figure.")] = Path("nfnn"),
    as_json: Json = False,
) -> None:
    """NfNN's parameter servers on MNIST: seconds, accuracy and bytes beside the published ones."""
    from evener.journey.experiments.nfnn import nfnn

    nfnn(
        data=data,
        updates=updates,
        workers=workers,
        modes=mode,
        repeat=repeat,
        seed=seed,
        output=output,
        as_json=as_json,
    )


def _home(home: Path | None) -> Path:
    from evener.star.home import default_home

    return home or default_home(os.environ)


def _options(items: list[str]) -> dict[str, str]:
    pairs: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise InvalidValue("--option", item, "key=value")
        pairs[key] = value
    return pairs
