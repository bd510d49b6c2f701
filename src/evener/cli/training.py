"""`evener train`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import Home, Json, Master, Memory, Patience, Speeds, Token, TokenFile, home_of, options_of


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
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Train TASK on this machine, as a rank of torchrun, or (with --agreement) on the nodes of a master."""
    from evener.run import ps_options
    from evener.run.folder import folder_name
    from evener.run.order import Order
    from evener.run.ps_options import Way, Where

    way = Way(
        protocol=agreement,
        staleness=staleness,
        local_steps=local_steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
        overlap=overlap,
    )
    ps_options.check_way(way)
    order = Order(
        task=task,
        data_dir=str(data) if data else None,
        options=options_of(option),
        output=folder_name(task, str(output) if output else None),
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
    token = ps_options.given_token(token, token_file, os.environ if master else {})
    where = Where(local_nodes, home_of(home), master, token, ship_data)
    if agreement is not None:
        from evener.run.ps_train import train_on_star

        ps_options.refuse_collective(order, plan=plan, devices=devices, memory=memory)
        train_on_star(order, way, where, as_json=as_json)
        return
    ps_options.refuse_star(where, home=home)
    from evener.run import commands

    commands.train(
        order,
        plan=plan,
        local_nodes=local_nodes,
        devices=devices,
        memory=memory,
        as_json=as_json,
        environment=os.environ,
    )
