"""From what a user types, `digits` or `my_task.py`, to a Task or ThinTask. Needs no PyTorch until a Task is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from evener.errors import InvalidInput
from evener.task import Task, ThinTask
from evener.tasks.extras import needing_extras
from evener.tasks.file import blaming, import_file
from evener.tasks.options import arguments, nearest

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
    if is_path(reference):
        path = Path(reference).resolve()
        return _make(Task, getattr(import_file(path), "task", None), str(path), data_dir, options, blaming(path))
    _require_known(reference, BUILT_IN_TASKS)
    with needing_extras():
        module = import_module(f"evener.tasks.{reference.replace('-', '_')}")
    return _make(Task, module.task, f"task {reference}", data_dir, options, needing_extras())


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
        found = getattr(import_file(path), "thin_task", None)
        return _make(ThinTask, found, str(path), data_dir, options, blaming(path))
    _require_known(reference, BUILT_IN_THIN_TASKS, "thin ")
    module = import_module(f"evener.tasks.thin.{reference.replace('-', '_')}")
    return _make(ThinTask, module.thin_task, f"task {reference}", data_dir, options, nullcontext())


def has_thin_task(reference: str) -> bool:
    """Whether machines without PyTorch can do it."""
    if is_path(reference):
        path = Path(reference).resolve()
        return thin_twin(path) is not None or "thin_task" in path.read_text(encoding="utf-8")
    return reference in BUILT_IN_THIN_TASKS


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


def _make(
    kind: type[_Kind],
    found: Any,
    where: str,
    data_dir: Path | None,
    options: Mapping[str, str],
    calling: AbstractContextManager[None],
) -> _Kind:
    """The task that `found` is, or returns when it is called within `calling`."""
    name, article = ("task", "a Task") if kind is Task else ("thin_task", "a ThinTask")
    if isinstance(found, kind):
        if data_dir is not None or options:
            raise InvalidInput(f"{where}: {name} is not a function, so it takes no data folder and no options")
        return found
    if not callable(found):
        what = "there is none" if found is None else f"it is of type {type(found).__name__}"
        raise InvalidInput(f"{where} must define {name}, {article} or a function that returns one; {what}")
    keywords = arguments(found, where, options, {"data_dir": data_dir})
    with calling:
        task = found(**keywords)
    if not isinstance(task, kind):
        raise InvalidInput(
            f"{where}: the function {name} must return {article}, it returned type {type(task).__name__}"
        )
    return task
