"""`evener experiment ...`: published experiments, done again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evener.cli.options import Json


def oracle_abci(csv: Annotated[Path, typer.Option(help="File to write.")] = Path("oracle-abci.csv")) -> None:
    """Predict the iterations of the published measurements on up to 1024 V100s."""
    from evener.journey import planning

    planning.oracle_abci(csv)


def nfnn(
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
