"""Runs a user's Python file as a module; what goes wrong in it is told with its file and line."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from evener.errors import EvenerError, MissingFile, TrainingFailed
from evener.tasks.extras import needing_extras


def import_file(path: Path) -> ModuleType:
    """The module in the file `path`, run afresh under a name of its own; it may import the files beside it.

    Raises:
        MissingFile: there is no such file.
        MissingExtra: it imports PyTorch or torchvision, which is not installed.
        TrainingFailed: it raised an error; says which and on what line.
    """
    path = path.resolve()
    if not path.is_file():
        raise MissingFile(f"there is no task file {path}")
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


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Tells an error raised by the code of the file `path` in one sentence; Evener's own errors pass as they are."""
    try:
        with needing_extras():
            yield
    except EvenerError:
        raise
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise TrainingFailed(f"{path} line {_line(path, error)}: {type(error).__name__}: {what}") from error


def _line(path: Path, error: Exception) -> int | str:
    """Of the file `path`, where `error` passed last."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or "?"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (lines and lines[-1]) or "?"
