"""`evener train my_task.py --help`: below the options of the command those of the task, read from its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from evener.data.tasks.parameters import TaskParameter, task_parameters

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
