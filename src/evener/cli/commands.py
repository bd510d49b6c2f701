"""The command `evener` with all its commands: the entry point."""

from evener.cli.app import app, experiment, main
from evener.cli.experiments import gpipe, nfnn, oracle_abci, resnet152_strategies
from evener.cli.looking import benchmark, demo, report, trace, version
from evener.cli.planning import plan
from evener.cli.ps import down, join, nodes, up
from evener.cli.training import train

__all__ = ["app", "main"]

for _command in (train, plan, benchmark, trace, report, demo, up, join, nodes, down, version):
    app.command()(_command)
for _command in (nfnn, oracle_abci, resnet152_strategies, gpipe):
    experiment.command()(_command)
app.add_typer(experiment, name="experiment")
