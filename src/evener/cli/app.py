"""The command `evener`: all its commands under their names, and how it ends. The entry point."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from evener import __version__
from evener.cli import commands
from evener.cli.experiments import experiment
from evener.cli.fields import command_of, with_default_port
from evener.cli.help import PLAN, TRAIN, TUNE, epilog
from evener.cli.task_help import OF_TASKS, TaskCommand
from evener.errors import EvenerError, Interrupted, MissingExtra
from evener.run.usual_options import usual_options
from evener.search.options import TuneConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings={"ignore_unknown_options": True})(command_of(commands.run))

for _command in (
    command_of(commands.train, TRAIN, usual_options),
    command_of(commands.tune, TUNE, partial(usual_options, kind=TuneConfig, command="tune")),
    command_of(commands.yolo),
    command_of(commands.plan, PLAN),
    commands.catalogue,
    command_of(commands.benchmark),
    command_of(commands.trace),
    commands.report,
    commands.dashboard,
    commands.init,
    command_of(commands.demo),
    command_of(commands.doctor),
    commands.version,
    command_of(commands.up),
    command_of(commands.join),
    command_of(commands.nodes),
    command_of(commands.invite),
    command_of(commands.stop),
    command_of(commands.down),
):
    app.command(epilog=epilog(_command.__name__), cls=TaskCommand if _command.__name__ in OF_TASKS else None)(_command)
app.add_typer(experiment, name="experiment")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"evener {__version__}\n")
        raise typer.Exit


_Version = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of Evener.")


@app.callback()
def evener(version: Annotated[bool, _Version] = False) -> None:
    """Trains one PyTorch model on uneven machines."""


def main() -> None:
    """Run the command line; errors of Evener are one sentence and an exit code."""
    try:
        code = app(with_default_port(sys.argv[1:]), standalone_mode=False)
    except EvenerError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail("this needs PyTorch, which is not installed: pip install 'evener[torch]'", MissingExtra.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", Interrupted.exit_code)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            _refuse(error.format_message() if hasattr(error, "format_message") else str(error))
        raise
    if code == Interrupted.exit_code:  # what typer makes of Ctrl-C
        _fail("stopped", code)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(sentence: str) -> None:
    """End because of what was typed; help was asked for if there is nothing to say of it."""
    if not sentence:
        sys.exit(0)
    _fail(sentence, 2)


def _fail(sentence: str, code: int) -> None:
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()
    sys.exit(code)
