"""Which files beside a task file it needs: found by reading its imports, never by running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from evener.records.errors import MissingFile, TrainingFailed

Name = tuple[str, ...]
"""A dotted name of a module, in parts."""


def files_needed(task_file: Path) -> list[str]:
    """The task file and all modules beside it that it imports, directly or not, as paths relative to its folder.

    What is imported by a name made at run time is not found; nor are files that are opened and not imported.

    Raises:
        MissingFile: there is no such task file.
        TrainingFailed: one of the files is not Python.
    """
    root, files, open_files = task_file.parent, set[str](), [task_file.name]
    if not task_file.is_file():
        raise MissingFile(f"there is no task file {task_file}")
    while open_files:
        path = open_files.pop()
        if path not in files:
            files.add(path)
            for module in _imports(root, path):
                open_files += _files_of(root, module)
    return sorted(files)


def _imports(root: Path, path: str) -> Iterator[Name]:
    """Names that the file `path` imports, each with everything that may be a module of it."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(_parse(root / path)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = above + tuple(node.module.split(".") if node.module else ())
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or "?"
        raise TrainingFailed(f"{file} line {line}: {type(error).__name__}: {str(error).partition(' (')[0]}") from error


def _files_of(root: Path, module: Name) -> Iterator[str]:
    """The files, as far as they lie below `root`, that importing `module` runs: its packages' and its own."""
    for depth in range(1, len(module) + 1):
        place = PurePosixPath(*module[:depth])
        for candidate in (place / "__init__.py", place.with_suffix(".py")):
            if (root / candidate).is_file():
                yield str(candidate)
                break
