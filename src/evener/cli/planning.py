"""`evener plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import Json, options_of


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
    from evener.run import planning

    question = planning.Question(
        model=model,
        options=options_of(option),
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
