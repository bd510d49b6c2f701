"""`evener train my_task.py --help`: the options of the task below those of the command. Its file is read, not run.

PyTorch is not loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typer.core import TyperCommand

from evener.data.tasks.arguments import KINDS
from evener.data.tasks.load import BUILT_IN_TASKS

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
