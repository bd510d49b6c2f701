"""The commands of `evener experiment`: published experiments, done again. Each loads what it needs when called.

An experiment writes into its folder alone: no other process may until it ends.
"""

from __future__ import annotations

import typer

from evener.cli.before import loading
from evener.cli.fields import command_of
from evener.experiments.options import AbciConfig, GpipeConfig, NfnnConfig, ScatteredConfig, StrategiesConfig


def nfnn(config: NfnnConfig, as_json: bool) -> None:
    """NfNN's parameter servers on MNIST: seconds, accuracy and bytes beside the published ones."""
    with loading(as_json):
        from evener.experiments import nfnn
        from evener.training.console import locked_folder

    with locked_folder(config.output):
        nfnn.run(config, as_json=as_json)


def oracle_abci(config: AbciConfig) -> None:
    """Predict the iterations of the published measurements on up to 1024 V100s."""
    from evener.experiments import abci

    abci.run(config.csv)


def resnet152_strategies(config: StrategiesConfig, as_json: bool) -> None:
    """ResNet-152 by strategy, ranks and batch: seconds of a step and bytes, beside what was published."""
    with loading(as_json):
        from evener.experiments import strategies
        from evener.training.console import locked_folder

    with locked_folder(config.output):
        strategies.run(config, as_json=as_json)


def gpipe(config: GpipeConfig, as_json: bool) -> None:
    """GPipe's tables: the largest model by devices, throughput by stages and micro-batches, beside the published."""
    with loading(as_json):
        from evener.experiments import gpipe
        from evener.training.console import locked_folder

    with locked_folder(config.output):
        gpipe.run(config, as_json=as_json)


def scattered_gpus(config: ScatteredConfig, as_json: bool) -> None:
    """One detector on nodes with a machine each: every way to merge what they learn, beside what was published."""
    with loading(as_json):
        from evener.experiments import scattered
        from evener.training.console import locked_folder

    with locked_folder(config.output):
        scattered.run(config, as_json=as_json)


experiment = typer.Typer(no_args_is_help=True, help="Published experiments, done again.")
for _command in (
    command_of(nfnn),
    command_of(oracle_abci),
    command_of(resnet152_strategies),
    command_of(gpipe),
    command_of(scattered_gpus),
):
    experiment.command()(_command)
