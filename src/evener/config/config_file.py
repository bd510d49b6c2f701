"""`evener.toml` beside a task: default options of its runs, named as the fields of a RunConfig.

    epochs = 20                 for `evener train`, and for other commands that have such an option
    [tune]                      for that command alone
    trials = 50

Typed options override the file, and the file overrides the defaults. Needs no PyTorch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from evener.config.conflicts import option_name
from evener.config.option_values import description_of, field_value
from evener.config.run_config import RunConfig
from evener.data.tasks.load import is_path
from evener.records.errors import InvalidFile, InvalidInput, nearest

FILE = "evener.toml"
COMMANDS = ("tune",)
"""Commands with a table of their own in the file."""
_TRAINING_ONLY = ("output", "resume", "dashboard", "agreement")
"""Options that other commands do not take from the file: folder and manner of one training."""


@contextmanager
def usual_options(
    typed: Mapping[str, Any], names: Container[str], kind: type[Struct] = RunConfig, command: str = ""
) -> Iterator[dict[str, Any]]:
    """Return the fields of a RunConfig: typed options, options of the file beside its task, and defaults.

    If an option from the file causes an error in the block, the error names its line there.

    Args:
        typed: field -> value, or default.
        names: fields that were typed.
        kind: struct of another command.
        command: one of COMMANDS; empty for `evener train`.

    Raises:
        InvalidFile: the file is not TOML, or has a key or value that does not fit an option; names file and line.
    """
    file = Path(typed["task"]).parent / FILE
    if not has_usual_options(typed["task"]):
        yield dict(typed)
        return
    text = _read(file)
    values = _values(file, text, kind, command)
    used = {name: value for name, value in values.items() if name == "option" or name not in names}
    of_task = {key: value for key, value in used.get("option", {}).items() if key not in typed["option"]}
    reported = {**used, "option": of_task}
    try:
        yield {**typed, **used, "option": {**of_task, **typed["option"]}, "usual": _sentence(file, reported)}
    except InvalidInput as error:
        name = next((name for name in used if re.search(rf"{option_name(name)}(?![\w-])", str(error))), None)
        if name is None:
            raise
        raise InvalidInput(f"{error}; {option_name(name)} is from {file} line {_line(text, name)}") from error


def has_usual_options(task: str) -> bool:
    """Return whether there is a file beside the task `task`; built-in tasks have none."""
    if not is_path(task) and not Path(task).suffix:
        return False
    try:
        return (Path(task).parent / FILE).is_file()
    except OSError as error:
        raise InvalidFile(f"cannot read {Path(task).parent / FILE}: {error.strerror}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile(f"cannot read {file}: {error}") from error


def _values(file: Path, text: str, kind: type[Struct], command: str) -> dict[str, Any]:
    """Return the fields that the file sets: of training, and of a command that has a table of its own."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFile(f"{file}: {error}") from error
    command_table = {name: table.pop(name) for name in COMMANDS if isinstance(table.get(name), dict)}.get(command, {})
    values = dict(_value(file, text, RunConfig, "train", key, value) for key, value in table.items())
    if command:
        options = _options_of(kind)
        values = {name: value for name, value in values.items() if name in options and name not in _TRAINING_ONLY}
        values |= dict(_value(file, text, kind, command, key, value) for key, value in command_table.items())
    return values


def _options_of(kind: type[Struct]) -> dict[str, FieldInfo]:
    return {one.name: one for one in fields(kind) if description_of(one) and not one.required}


def _value(file: Path, text: str, kind: type[Struct], command: str, key: str, value: Any) -> tuple[str, Any]:
    name, place, options = key.replace("-", "_"), f"{file} line {_line(text, key)}", _options_of(kind)
    if name not in options:
        raise InvalidFile(f"{place}: evener {command} has no option {key!r}{nearest(name, options)}")
    if name == "token":
        raise InvalidFile(
            f"{place}: do not put a token into a file beside code: use token_file to name a file that only you can read"
        )
    try:
        return name, field_value(options[name], value, file.parent)
    except InvalidInput as error:
        raise InvalidFile(f"{place}: {error}") from error


def _line(text: str, key: str) -> int | str:
    """Return the line in which the file sets a key of its first table, or begins the table of that name."""
    word = "[-_]".join(map(re.escape, re.split("[-_]", key)))
    pattern = re.compile(rf"^\s*(?:\[\s*)?[\"']?{word}[\"']?\s*[=.\]]")
    return next((i for i, line in enumerate(text.splitlines(), start=1) if pattern.match(line)), "?")


def _sentence(file: Path, values: Mapping[str, Any]) -> str:
    """Describe the options from the file."""
    options = [f"{name}={value}" for name, value in values.items() if name != "option"]
    options += [f"option.{name}={value}" for name, value in values["option"].items()]
    return f"{', '.join(options)} (from {file})" if options else ""
