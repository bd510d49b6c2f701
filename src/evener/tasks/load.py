"""From what a user types, `digits` or `my_task.py`, to a Task. Needs no PyTorch until a task is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

from evener.errors import InvalidInput
from evener.task import Task
from evener.tasks.extras import needing_extras
from evener.tasks.file import blaming, import_file
from evener.tasks.options import arguments, nearest

BUILT_IN_TASKS = ("digits", "mnist", "synthetic", "tiny-imagenet")
"""Names of the tasks that come with Evener."""


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
        return _make(getattr(import_file(path), "task", None), str(path), data_dir, options, blaming(path))
    if reference not in BUILT_IN_TASKS:
        raise InvalidInput(
            f"there is no task {reference!r}{nearest(reference, BUILT_IN_TASKS)}; Evener has "
            f"{', '.join(BUILT_IN_TASKS)}; for one of your own give the path of its Python file"
        )
    with needing_extras():
        module = import_module(f"evener.tasks.{reference.replace('-', '_')}")
    return _make(module.task, f"task {reference}", data_dir, options, needing_extras())


def is_path(reference: str) -> bool:
    """Whether a task's reference is a file: it ends in .py or has a path separator in it."""
    return reference.endswith(".py") or any(sep in reference for sep in (os.sep, os.altsep) if sep)


def _make(
    found: Any, where: str, data_dir: Path | None, options: Mapping[str, str], calling: AbstractContextManager[None]
) -> Task:
    """The task that `found` is, or returns when it is called within `calling`."""
    if isinstance(found, Task):
        if data_dir is not None or options:
            raise InvalidInput(f"{where}: task is not a function, so it takes no data folder and no options")
        return found
    if not callable(found):
        what = "there is none" if found is None else f"it is of type {type(found).__name__}"
        raise InvalidInput(f"{where} must define task, a Task or a function that returns one; {what}")
    keywords = arguments(found, where, options, {"data_dir": data_dir})
    with calling:
        task = found(**keywords)
    if not isinstance(task, Task):
        raise InvalidInput(f"{where}: the function task must return a Task, it returned type {type(task).__name__}")
    return task
