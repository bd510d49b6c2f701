"""The command `evener`: all its commands under their names, their help, and how it ends. The entry point.

`evener train my_task.py --help` shows the options of the task below those of the command. Its file is read, not run,
and PyTorch is not loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from evener import __version__
from evener.cli import commands
from evener.cli.fields import Usual, command_of, with_default_port
from evener.cli.help import PLAN, TRAIN, TUNE, Panels, epilog
from evener.config.config_file import usual_options
from evener.data.tasks.arguments import KINDS
from evener.data.tasks.load import BUILT_IN_TASKS
from evener.records.errors import (
    EvenerError,
    Interrupted,
    InvalidInput,
    MissingExtra,
    TrainingFailed,
    ended_by_itself,
    exit_code_of,
    explain,
    is_of_the_disk,
    place_of,
    pytorch_refusal,
    system_refusal,
    user_frame,
    words_of,
)
from evener.records.version import pip_install
from evener.search.options import TuneConfig
from evener.system.signals import was_interrupted

if TYPE_CHECKING:
    from rich.panel import Panel

OF_TASKS = ("train", "tune", "trace", "doctor")
"""Commands that take `--option NAME=VALUE` for a task."""
_WORDS = "evener.words"


class TaskCommand(TyperCommand):
    """A command whose help knows the task that was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words, for `--help` is asked before they are read."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the command, then that of the task."""
        super().format_help(ctx, formatter)
        if (panel := panel_of(ctx.meta.get(_WORDS, ()))) is not None:
            from evener.training.console import open_console

            open_console(to_stderr=False, width_in_files=80).print(panel)


def panel_of(arguments: Sequence[str]) -> Panel | None:
    """Return the options of the first argument that is a task; None if none is."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    for argument in arguments:
        parameters = task_parameters(argument)
        if parameters is None:
            continue
        table = Table.grid(padding=(0, 2))
        for one in parameters:
            table.add_row(f"{one.name}=", f"<{one.kind}>", f"{one.description} {_default(one)}".strip())
        if not parameters:
            table.add_row("it takes none")
        title = Text(f"Options of {argument}, each as --option NAME=VALUE")
        return Panel(table, title=title, title_align="left", border_style="dim")
    return None


def _default(one: TaskParameter) -> str:
    if one.default is None:
        return "[required]"
    return f"[default: {one.default}]" if one.default else ""


_FIXED = ("data_dir",)
"""Parameters that are no options."""


class TaskParameter(NamedTuple):
    """An option of a task.

    Attributes:
        name: of the parameter.
        kind: as it is annotated, in a word.
        default: as the file has it, empty if it is computed there; None if there is none.
        description: of the docstring's `Args`; empty if there is none.
    """

    name: str
    kind: str
    default: str | None
    description: str


def task_parameters(reference: str) -> list[TaskParameter] | None:
    """Return the options of the task that `reference` names, an empty list if its `task` is not a function.

    Return None if `reference` is not a task, or its file cannot be read or does not define `task` itself.
    """
    path = _file_of(reference)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # who asks for help is not told of the file; who trains is
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name == "task":
            return list(_parameters(node))
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == "task" for one in node.targets):
            return [] if isinstance(node.value, ast.Call) else None
    return None


def _file_of(reference: str) -> Path | None:
    if reference in BUILT_IN_TASKS:
        spec = importlib.util.find_spec(f"evener.data.tasks.{reference.replace('-', '_')}")
        return None if spec is None or spec.origin is None else Path(spec.origin)
    path = Path(reference)
    return path if path.suffix == ".py" and path.is_file() else None


def _parameters(function: ast.FunctionDef) -> Iterator[TaskParameter]:
    descriptions = _descriptions(ast.get_docstring(function) or "")
    places, named = [*function.args.posonlyargs, *function.args.args], function.args.kwonlyargs
    defaults = [None] * (len(places) - len(function.args.defaults)) + [*function.args.defaults]
    for one, default in zip([*places, *named], [*defaults, *function.args.kw_defaults], strict=True):
        if one.arg not in _FIXED:
            yield TaskParameter(
                one.arg, _kind(one.annotation, default), _literal(default), descriptions.get(one.arg, "")
            )


def _literal(default: ast.expr | None) -> str | None:
    is_name = any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(default)) if default is not None else False
    return None if default is None else "" if is_name else ast.unparse(default)


def _kind(annotation: ast.expr | None, default: ast.expr | None) -> str:
    if annotation is None:
        return (
            type(default.value).__name__ if isinstance(default, ast.Constant) and default.value is not None else "str"
        )
    name = ast.unparse(annotation).replace(" ", "").removesuffix("|None").strip("'\"")
    return "sizes, such as 3x64x64" if name == "tuple[int,...]" else name if name in KINDS else "no option"


def _descriptions(docstring: str) -> dict[str, str]:
    """Return the first line of each description in the `Args` of a docstring, by name."""
    _, _, behind = docstring.partition("Args:\n")
    lines = behind.partition("\n\n")[0].splitlines()
    matches = (re.match(r"\s+(\w+)(?: \([^)]*\))?: (.+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


class _Command(NamedTuple):
    """One of `evener`'s; see `command_of`."""

    run: Callable[..., None]
    panels: Panels | None = None
    usual: Usual | None = None

    @property
    def function(self) -> Callable[..., None]:
        return self.run if self.run in _SIMPLE else command_of(self.run, self.panels, self.usual)


_SIMPLE = (commands.catalogue, commands.report, commands.dashboard, commands.init, commands.version)
"""Their options are their own parameters."""
_COMMANDS = (
    _Command(commands.run),
    _Command(commands.train, TRAIN, usual_options),
    _Command(commands.tune, TUNE, partial(usual_options, kind=TuneConfig, command="tune")),
    _Command(commands.yolo),
    _Command(commands.plan, PLAN),
    _Command(commands.catalogue),
    _Command(commands.benchmark),
    _Command(commands.trace),
    _Command(commands.report),
    _Command(commands.dashboard),
    _Command(commands.init),
    _Command(commands.demo),
    _Command(commands.doctor),
    _Command(commands.version),
    _Command(commands.up),
    _Command(commands.join),
    _Command(commands.leave),
    _Command(commands.relay),
    _Command(commands.nodes),
    _Command(commands.invite),
    _Command(commands.stop),
    _Command(commands.down),
)


_MIN_OPEN_FILES = 64


def _print_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"evener {__version__}\n")
        raise typer.Exit


_Version = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of Evener.")


def evener(version: Annotated[bool, _Version] = False) -> None:
    """Trains one PyTorch model on uneven machines."""


def app_of(first: str = "") -> typer.Typer:
    """The command line: of the command that is typed `first` alone, or of all, as for `--help` and mistakes.

    The options of all take a MB, which a node would keep as long as it lives.
    """
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(evener)
    chosen = [one for one in _COMMANDS if one.run.__name__ == first]
    for one in chosen or _COMMANDS:
        _add(app, one)
    if not chosen:
        from evener.cli.experiments import experiment

        app.add_typer(experiment, name="experiment")
    return app


def _add(app: typer.Typer, one: _Command) -> None:
    name = one.run.__name__
    settings: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}} if one.run is commands.run else {}
    cls = TaskCommand if name in OF_TASKS else None
    app.command(epilog=epilog(name), cls=cls, **settings)(one.function)


def main() -> None:
    """Run the command line; errors of Evener are one sentence and an exit code."""
    _open_streams()
    _require_folder()
    _require_open_files()
    try:
        arguments = with_default_port(sys.argv[1:])
        code = app_of(next(iter(arguments), ""))(arguments, standalone_mode=False)
    except EvenerError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except SystemExit as error:
        if user_frame(error) is None:
            raise
        _fail(str(ended_by_itself(error)), TrainingFailed.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail(f"this needs PyTorch, which is not installed: {pip_install('torch')}", MissingExtra.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", Interrupted.exit_code)
    except Exception as error:
        if is_of_the_disk(error):
            _fail(explain(error)[0], exit_code_of(error))
        if type(error).__module__.startswith(("click", "typer")):
            sentence = error.format_message() if hasattr(error, "format_message") else str(error)
            is_folder = "--resume" in sys.argv and "extra argument" in sentence
            _refuse(f"{sentence}; --resume takes no folder: name it by --checkpoint FOLDER" if is_folder else sentence)
        if place := place_of(error):  # in the user's code
            _fail(f"{words_of(error)}{place}", TrainingFailed.exit_code)
        if sentence := system_refusal(error) or pytorch_refusal(error):
            _fail(sentence, EvenerError.exit_code)
        if was_interrupted():
            _fail("stopped", Interrupted.exit_code)
        raise
    if code == Interrupted.exit_code:  # what typer makes of Ctrl-C
        _fail("stopped", code)
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Lead streams that were closed before this process began to nowhere, so that no socket gets their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            if nowhere.fileno() == number:
                os.set_inheritable(number, True)  # as a stream of the processes that this one starts
            elif not os.path.exists(f"/proc/self/fd/{number}"):
                os.dup2(nowhere.fileno(), number)
            setattr(sys, name, nowhere)


def _require_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        _fail(
            f"the current folder cannot be used ({error.strerror}): type `cd` and begin again", InvalidInput.exit_code
        )


def _require_open_files() -> None:
    """End where so few files may be open that processes could not tell each other what fails."""
    try:
        import resource
    except ImportError:  # on Windows, which has no such limit
        return
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= allowed < _MIN_OPEN_FILES:
        sentence = f"this process may open {allowed} files, and needs {_MIN_OPEN_FILES}: type `ulimit -n 1024`"
        _fail(sentence, InvalidInput.exit_code)


def _refuse(sentence: str) -> None:
    """End because of what was typed; help was asked for if there is nothing to say of it."""
    if not sentence:
        sys.exit(0)
    _fail(sentence, 2)


def _fail(sentence: str, code: int) -> None:
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()
    sys.exit(code)
