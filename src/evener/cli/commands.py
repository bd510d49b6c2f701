"""The command `evener` with all its commands, and how it ends: the entry point."""

from __future__ import annotations

import sys

import typer

from evener.cli.experiments import gpipe, nfnn, oracle_abci, resnet152_strategies
from evener.cli.ps import down, join, nodes, up
from evener.cli.run import COMMANDS
from evener.errors import EvenerError, MissingExtra

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains one PyTorch model on uneven machines.",
)
experiment = typer.Typer(no_args_is_help=True, help="Published experiments, done again.")

for _command in (*COMMANDS, up, join, nodes, down):
    app.command()(_command)
for _command in (nfnn, oracle_abci, resnet152_strategies, gpipe):
    experiment.command()(_command)
app.add_typer(experiment, name="experiment")


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
