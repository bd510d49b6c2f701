"""From what a user types, `digits` or `my_task.py`, to a Task or ThinTask. Needs no PyTorch until a Task is loaded."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from evener.data.tasks.arguments import arguments_for
from evener.records.errors import (
    EvenerError,
    InvalidInput,
    MissingExtra,
    MissingFile,
    TrainingFailed,
    file_line,
    is_users,
    nearest,
    note_call,
    short_path,
    user_frame,
    words_of,
)
from evener.records.task import BatchTask, Task, ThinTask
from evener.records.version import pip_install


def import_file(path: Path) -> ModuleType:
    """The module in the file `path`, run afresh under a name of its own; it may import the files beside it.

    Raises:
        MissingFile: there is no such file.
        MissingExtra: it imports PyTorch or torchvision, which is not installed.
        TrainingFailed: it raised an error; says which and on what line.
    """
    path = path.resolve()
    require_task(str(path))
    name = f"evener_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MissingFile(f"{path} is not a Python file: a task file ends in .py")
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        with blaming(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


EXTRAS = {
    "torch": ("PyTorch", "torch"),
    "torchvision": ("torchvision", "vision"),
    "cloudpickle": ("cloudpickle, which sends a task that lies in no file,", "notebook"),
    "lightning": ("Lightning", "lightning"),
    "transformers": ("transformers", "transformers"),
    "PIL": ("Pillow, which reads the images,", "vision"),
}
"""Module -> its name for people, and the extra of Evener that installs it."""


@contextmanager
def needing_extras() -> Iterator[None]:
    """Turns the absence of an optional dependency in this block into MissingExtra; other errors pass as they are."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        name, extra = EXTRAS[error.name]
        raise MissingExtra(f"{name} is not installed: {pip_install(extra)}") from error


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Tells an error raised by the code of the file `path` in one sentence; Evener's own errors pass as they are."""
    try:
        with needing_extras():
            yield
    except EvenerError:
        raise
    except SystemExit as error:
        code = f"exit code {error.code}" if isinstance(error.code, int) else error.code or "exit code 0"
        raise TrainingFailed(
            f"{short_path(path)} line {_line(path, error)} ends the process by itself: {code}"
        ) from error
    except Exception as error:
        raise TrainingFailed(f"{short_path(path)} line {_line(path, error)}: {words_of(error)}") from error


def _line(path: Path, error: BaseException) -> int | str:
    """Return the last line of the file `path` in the traceback of `error`."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or "?"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (lines and lines[-1]) or "?"


BUILT_IN_TASKS = ("digits", "mnist", "nfnn", "synthetic", "tiny-imagenet")
"""Names of the tasks that come with Evener."""

BUILT_IN_THIN_TASKS = ("digits", "mnist", "nfnn")
"""Names of those that need no PyTorch."""

_Kind = TypeVar("_Kind", Task, ThinTask)


def load_task(reference: str, data_dir: Path | None = None, options: Mapping[str, str] = {}) -> Task:
    """The task that `reference` names.

    Args:
        reference: one of BUILT_IN_TASKS, or the path of a Python file that defines `task`: a Task, or a function that
            returns one.
        data_dir: folder of the data set, passed to the function as `data_dir`; None for the task's own default.
        options: further arguments of the function, as text: `{"depth": "4", "image": "3x64x64"}`.

    Raises:
        InvalidInput: the name, an option or its value is not known; the file defines no task.
        MissingFile: the file, or the data set, is not there.
        MissingExtra: PyTorch, or what else the task needs, is not installed.
        TrainingFailed: the file's own code raised an error.
    """
    task = load_any_task(reference, data_dir, options)
    if isinstance(task, BatchTask):
        raise InvalidInput(
            f"{reference} is a BatchTask, of which nodes can divide batches and nothing else: `evener train` and "
            "`evener.train` do; for this command write a Task"
        )
    return task


def require_task(reference: str) -> None:
    """See that there is such a task or file, before anything is loaded for it.

    Raises:
        InvalidInput: there is no task of that name, it is a pipe or a folder, or it is a program.
        MissingFile: there is no such file.
    """
    if not is_path(reference):
        _require_known(reference, BUILT_IN_TASKS)
    elif Path(reference).exists() and not Path(reference).is_file():
        raise InvalidInput(
            f"{reference} is no file that every node can read: save the task in one, such as my_task.py, and name that"
        )
    elif not Path(reference).is_file():
        raise MissingFile(f"there is no task file {Path(reference).resolve()}")
    elif _is_program(Path(reference)):
        raise InvalidInput(
            f"{reference} calls evener.join(), so it is a program and not a task: train it with `evener run "
            f"{reference}` or under torchrun; for this command, and for the nodes of a master, write a task of its "
            "model, loss and data"
        )


def load_any_task(reference: str, data_dir: Path | None = None, options: Mapping[str, str] = {}) -> Task | BatchTask:
    """Load a Task or a BatchTask; arguments and errors as for `load_task`."""
    if is_path(reference):
        path = Path(reference).resolve()
        made = _any_task(getattr(import_file(path), "task", None), str(path), data_dir, options, blaming(path))
        return attributed(made, str(path))
    require_task(reference)
    with needing_extras():
        module = import_module(f"evener.data.tasks.{reference.replace('-', '_')}")
    return _make(Task, module.task, f"task {reference}", data_dir, options, needing_extras())


def task_of(task: Any, data_dir: Path | None = None, options: Mapping[str, str] = {}) -> Task | BatchTask:
    """Return `task`, or the task that it returns; arguments as for `load_task`. Raises InvalidInput."""
    return attributed(_any_task(task, "evener.train", data_dir, options, nullcontext()))


def load_thin_task(reference: str, data_dir: Path | None = None, options: Mapping[str, str] = {}) -> ThinTask:
    """The thin task that `reference` names; arguments as for `load_task`.

    A file `my_task.py` has its thin twin beside it, in `my_task_thin.py`, which must not import PyTorch; without such a
    twin the file itself has to define `thin_task`, a ThinTask or a function that returns one.

    Raises:
        InvalidInput: there is no thin task of that name, or what `load_task` raises it for.
        MissingFile: the file, or the data set, is not there.
        MissingExtra: the file imports PyTorch, which is not installed.
        TrainingFailed: the file's own code raised an error.
    """
    if is_path(reference):
        path = thin_twin(Path(reference).resolve()) or Path(reference).resolve()
        thin_task = getattr(import_file(path), "thin_task", None)
        return attributed(_make(ThinTask, thin_task, str(path), data_dir, options, blaming(path)), str(path))
    _require_known(reference, BUILT_IN_THIN_TASKS, "thin ")
    thin = import_module("evener.data.tasks.thin")  # not above: the thin engine takes its time to import
    return _make(ThinTask, getattr(thin, reference), f"task {reference}", data_dir, options, nullcontext())


def has_thin_task(reference: str) -> bool:
    """Whether machines without PyTorch can do it."""
    if is_path(reference):
        path = Path(reference).resolve()
        return thin_twin(path) is not None or "thin_task" in path.read_text(encoding="utf-8")
    return reference in BUILT_IN_THIN_TASKS


def _is_program(path: Path) -> bool:
    """Return whether a file calls evener.join() and defines no task; without running it, because it would train."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return False  # importing it reports the error with its line
    imported = {name.asname or name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return "evener.join" in calls and not (imported | stored | defined) & {"task", "thin_task", "*"}


def thin_twin(path: Path) -> Path | None:
    """The file of a task's thin twin, if there is one."""
    twin = path.with_name(f"{path.stem}_thin.py")
    return twin if twin.is_file() else None


def is_path(reference: str) -> bool:
    """Whether a task's reference is a file: it ends in .py or has a path separator in it."""
    return reference.endswith(".py") or any(sep in reference for sep in (os.sep, os.altsep) if sep)


def _require_known(name: str, known: Sequence[str], kind: str = "") -> None:
    if name not in known:
        raise InvalidInput(
            f"there is no {kind}task {name!r}{nearest(name, known)}; Evener has {', '.join(known)}; "
            "for one of your own give the path of its Python file"
        )


def _any_task(
    value: Any, where: str, data_dir: Path | None, options: Mapping[str, str], calling: AbstractContextManager[None]
) -> Task | BatchTask:
    """Return the Task or BatchTask that `value` is, or returns when it is called within `calling`."""
    made = _called(value, where, "task", "a Task", data_dir, options, calling)
    return made if isinstance(made, BatchTask) else _of_kind(Task, made, where, "task", "a Task")


def _make(
    kind: type[_Kind],
    value: Any,
    where: str,
    data_dir: Path | None,
    options: Mapping[str, str],
    calling: AbstractContextManager[None],
) -> _Kind:
    """Return the task that `value` is, or returns when it is called within `calling`."""
    name, article = ("task", "a Task") if kind is Task else ("thin_task", "a ThinTask")
    return _of_kind(kind, _called(value, where, name, article, data_dir, options, calling), where, name, article)


def _called(
    value: Any,
    where: str,
    name: str,
    article: str,
    data_dir: Path | None,
    options: Mapping[str, str],
    calling: AbstractContextManager[None],
) -> Any:
    if isinstance(value, Task | BatchTask | ThinTask):
        if data_dir is not None or options:
            raise InvalidInput(f"{where}: {name} is not a function, so it takes no data folder and no options")
        return value
    if not callable(value):
        what = "there is none" if value is None else f"it is of type {type(value).__name__}"
        raise InvalidInput(f"{where} must define {name}, {article} or a function that returns one; {what}")
    keywords = arguments_for(value, where, options, {"data_dir": data_dir})
    with calling:
        return value(**keywords)


def _of_kind(kind: type[_Kind], task: Any, where: str, name: str, article: str) -> _Kind:
    if not isinstance(task, kind):
        raise InvalidInput(
            f"{where}: the function {name} must return {article}, it returned type {type(task).__name__}"
        )
    return task


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
