"""`evener.toml` beside a task: the options with which it is usually trained, by the names of the fields of a RunConfig.

    epochs = 20                 of `evener train`; of other commands too, where they have such an option
    [tune]                      of that command alone
    trials = 50

What is typed goes before what the file says, and that before the default. Needs no PyTorch.
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
"""That have a table of their own in the file."""
_OF_TRAINING = ("output", "resume", "dashboard", "agreement")
"""What other commands do not take over: folder and manner of one training."""


@contextmanager
def usual_options(
    typed: Mapping[str, Any], names: Container[str], kind: type[Struct] = RunConfig, command: str = ""
) -> Iterator[dict[str, Any]]:
    """The fields of a RunConfig: of what was typed, of the file beside its task, and the defaults.

    An error in the block about an option that came from the file names its line there.

    Args:
        typed: field -> value, or default.
        names: fields that were typed.
        kind: of struct, if it is another command's.
        command: which, of COMMANDS; empty for `evener train`.

    Raises:
        InvalidFile: the file is not TOML, or has a key or value that is none of an option; names file and line.
    """
    file = Path(typed["task"]).parent / FILE
    if not has_usual_options(typed["task"]):
        yield dict(typed)
        return
    text = _read(file)
    said = _values(file, text, kind, command)
    found = {name: value for name, value in said.items() if name == "option" or name not in names}
    of_task = {key: value for key, value in found.get("option", {}).items() if key not in typed["option"]}
    told = {**found, "option": of_task}
    try:
        yield {**typed, **found, "option": {**of_task, **typed["option"]}, "usual": _sentence(file, told)}
    except InvalidInput as error:
        name = next((name for name in found if re.search(rf"{option_name(name)}(?![\w-])", str(error))), None)
        if name is None:
            raise
        raise InvalidInput(f"{error}; {option_name(name)} is from {file} line {_line(text, name)}") from error


def has_usual_options(task: str) -> bool:
    """Whether a file beside the task `task` says how it is usually trained; no task of Evener's own has one."""
    if not is_path(task) and not Path(task).suffix:
        return False
    try:
        return (Path(task).parent / FILE).is_file()
    except OSError as error:
        raise InvalidFile(f"cannot read {Path(task).parent / FILE}: {error.strerror}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile(f"cannot read {file}: {error}") from error


def _values(file: Path, text: str, kind: type[Struct], command: str) -> dict[str, Any]:
    """The fields that the file sets: of training, and of a command that has a table of its own."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFile(f"{file}: {error}") from error
    own = {name: table.pop(name) for name in COMMANDS if isinstance(table.get(name), dict)}.get(command, {})
    found = dict(_value(file, text, RunConfig, "train", key, value) for key, value in table.items())
    if command:
        taken = _options_of(kind)
        found = {name: value for name, value in found.items() if name in taken and name not in _OF_TRAINING}
        found |= dict(_value(file, text, kind, command, key, value) for key, value in own.items())
    return found


def _options_of(kind: type[Struct]) -> dict[str, FieldInfo]:
    return {one.name: one for one in fields(kind) if description_of(one) and not one.required}


def _value(file: Path, text: str, kind: type[Struct], command: str, key: str, value: Any) -> tuple[str, Any]:
    name, place, options = key.replace("-", "_"), f"{file} line {_line(text, key)}", _options_of(kind)
    if name not in options:
        raise InvalidFile(f"{place}: evener {command} has no option {key!r}{nearest(name, options)}")
    if name == "token":
        raise InvalidFile(
            f"{place}: a token is for no file beside code: name one that you alone can read, by token_file"
        )
    try:
        return name, field_value(options[name], value, file.parent)
    except InvalidInput as error:
        raise InvalidFile(f"{place}: {error}") from error


def _line(text: str, key: str) -> int | str:
    """Where the file sets a key of its first table, or begins the table of that name."""
    word = "[-_]".join(map(re.escape, re.split("[-_]", key)))
    pattern = re.compile(rf"^\s*(?:\[\s*)?[\"']?{word}[\"']?\s*[=.\]]")
    return next((i for i, line in enumerate(text.splitlines(), start=1) if pattern.match(line)), "?")


def _sentence(file: Path, values: Mapping[str, Any]) -> str:
    """What came from the file."""
    words = [f"{name}={value}" for name, value in values.items() if name != "option"]
    words += [f"option.{name}={value}" for name, value in values["option"].items()]
    return f"{', '.join(words)} (from {file})" if words else ""
