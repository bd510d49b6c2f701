"""`evener experiment ...`: published experiments, done again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evener.cli.fields import Json


def oracle_abci(csv: Annotated[Path, typer.Option(help="File to write.")] = Path("oracle-abci.csv")) -> None:
    """Predict the iterations of the published measurements on up to 1024 V100s."""
    from evener.experiments import abci

    abci.run(csv)


def nfnn(
    data: Annotated[Path | None, typer.Option(help="Folder of MNIST's IDX files; data/mnist by default.")] = None,
    updates: Annotated[int, typer.Option(help="Of the common weights, in every run.")] = 5000,
    workers: Annotated[str, typer.Option(help="Numbers of workers, such as 1,2,3.")] = "1,2,3",
    mode: Annotated[str, typer.Option(help="sync, async or sync,async.")] = "sync,async",
    repeat: Annotated[int, typer.Option(help="Runs of every cell.")] = 5,
    seed: Annotated[
        int,
        typer.Option(help="Of the weights, and of the first run's order; 9 is nearest to the published."),
    ] = 9,
    output: Annotated[Path, typer.Option(help="Folder of table and figure.")] = Path("nfnn"),
    as_json: Json = False,
) -> None:
    """NfNN's parameter servers on MNIST: seconds, accuracy and bytes beside the published ones."""
    from evener.experiments.nfnn import nfnn

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


def resnet152_strategies(
    ranks: Annotated[str | None, typer.Option(help="Numbers of ranks; 1,2 by default.")] = None,
    batch_size: Annotated[str | None, typer.Option(help="Samples of a step, such as 16,64; 8 by default.")] = None,
    chunks: Annotated[str | None, typer.Option(help="Micro-batches of pipelines, such as 2,8; 4 by default.")] = None,
    strategies: Annotated[
        str | None, typer.Option(help="As of `evener train --strategy`, such as data,sharded; all that divide one way.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="To be timed in every cell; 2 by default.")] = None,
    size: Annotated[int, typer.Option(help="Rows and columns of an image.")] = 64,
    full: Annotated[bool, typer.Option("--full", help="As published, for a machine with 8 GPUs.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of table and curves.")] = Path("resnet152-strategies"),
    as_json: Json = False,
) -> None:
    """ResNet-152 by strategy, ranks and batch: seconds of a step and bytes, beside what was published."""
    from evener.experiments.strategies import resnet152_strategies

    resnet152_strategies(
        ranks=ranks,
        batch_size=batch_size,
        chunks=chunks,
        strategies=strategies,
        steps=steps,
        size=size,
        full=full,
        output=output,
        as_json=as_json,
    )


def gpipe(
    table: Annotated[str, typer.Option(help="Of the paper: some of 1,2,3.")] = "1,2,3",
    stages: Annotated[str | None, typer.Option(help="Numbers of stages; 2,4 by default.")] = None,
    micro_batches: Annotated[str, typer.Option(help="Numbers of micro-batches in table 2.")] = "1,4,32",
    steps: Annotated[int, typer.Option(help="To be timed for every number.")] = 2,
    full: Annotated[bool, typer.Option("--full", help="The paper's models and memory, on 8 GPUs.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("gpipe"),
    as_json: Json = False,
) -> None:
    """GPipe's tables: the largest model by devices, throughput by stages and micro-batches, beside the published."""
    from evener.experiments.gpipe import gpipe

    gpipe(
        tables=table,
        stages=stages,
        micro_batches=micro_batches,
        steps=steps,
        full=full,
        output=output,
        as_json=as_json,
    )
