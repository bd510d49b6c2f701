"""A task whose functions name themselves in every error that they raise, so that users need no traceback to find it."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from evener.records.errors import InvalidInput, file_line, is_users, note_call, user_frame
from evener.records.task import BatchTask, Task, ThinTask

_AnyTask = TypeVar("_AnyTask", bound=Task | BatchTask | ThinTask)
_FUNCTIONS = (
    "model", "loss", "train_data", "validation_data", "scheduler", "correct", "labels", "collate", "count", "validate",
    "rate",
)  # fmt: skip
"""Fields of tasks that are functions; errors of optimizers are explained where they are made."""
_RESULTS = {
    "model": ("named_parameters", "an nn.Module"),
    "optimizer": ("param_groups", "an optimizer of torch.optim"),
    "scheduler": ("step", "a schedule of torch.optim.lr_scheduler"),
}
"""By field: an attribute of what the function has to return, and that in words."""
_MAX_DESCRIBED = 4


class _Attributed:
    """A function of a task that notes with every error which one it is, where it stands and what it was called with.

    Args:
        function: the user's.
        field: of the task.
        file: of the task; empty if it lies in none.
        result: an attribute of what it has to return, and that in words; None for anything.
    """

    def __init__(self, function: Callable[..., Any], field: str, file: str, result: tuple[str, str] | None) -> None:
        self.function, self.field, self.file, self.result = function, field, file, result
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            returned = self.function(*arguments, **keywords)
        except Exception as error:
            place = "" if user_frame(error) else self._place()
            note_call(error, f"{self.field}{place}{_described(self.function, arguments)}")
            raise
        if self.result is not None and not hasattr(returned, self.result[0]):
            raise InvalidInput(
                f"the task's {self.field} must return {self.result[1]}, it returned {type(returned).__name__} "
                f"({self._place().removeprefix(', ') or 'see the task'})"
            )
        return returned

    def _place(self) -> str:
        """Where the user wrote it: the line of the function, or else that of the field in the task's file."""
        code = getattr(self.function, "__code__", None)
        if code is not None and is_users(code.co_filename):
            return f", {file_line(code.co_filename, code.co_firstlineno)}"
        line = _line_of(self.file, self.field)
        return f", {file_line(self.file, line)}" if line else ""


def attributed(task: _AnyTask, file: str = "") -> _AnyTask:
    """`task`, each of whose functions names itself in the errors that it raises.

    Args:
        task: a user's.
        file: in which it stands; empty for none.
    """
    wrapped: dict[str, Any] = {}
    for one in fields(task):
        function = getattr(task, one.name)
        result = None if isinstance(task, ThinTask) else _RESULTS.get(one.name)
        if one.name in (*_FUNCTIONS, *_RESULTS) and callable(function) and not isinstance(function, _Attributed):
            wrapped[one.name] = _Attributed(function, one.name, file, result)
    return replace(task, **wrapped)


def _line_of(file: str, field: str) -> int | None:
    """Where a call in the file gives the argument `field`; None if it is not found."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next((one.value.lineno for call in calls for one in call.keywords if one.arg == field), None)


def _described(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Shapes, types and, of whole numbers, the range of the tensors among the arguments, by the parameters' names."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    tensors = [f"{name} {tensor}" for name, value in zip(names, arguments, strict=False) if (tensor := _tensor(value))]
    return f", called with {' and '.join(tensors[:_MAX_DESCRIBED])}" if tensors else ""


def _tensor(value: Any) -> str:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return ""
    kind = str(value.dtype).removeprefix("torch.")
    text = f"{tuple(value.shape)} {kind}"
    is_here = str(getattr(value, "device", "cpu")) == "cpu"  # a GPU that has failed answers nothing
    if "int" in kind and is_here and all(value.shape):
        text += f" from {int(value.min())} to {int(value.max())}"
    return text
