"""`evener.toml` beside a task: the options with which it is usually trained, by the names of the fields of a RunConfig.

What is typed goes before what the file says, and that before the default. Needs no PyTorch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import FieldInfo, fields

from evener.errors import InvalidFile, InvalidInput, nearest
from evener.run.config import RunConfig
from evener.run.conflicts import option_name
from evener.run.option_values import description_of, field_value
from evener.tasks.load import is_path

FILE = "evener.toml"


@contextmanager
def usual_options(typed: Mapping[str, Any], names: Container[str]) -> Iterator[dict[str, Any]]:
    """The fields of a RunConfig: of what was typed, of the file beside its task, and the defaults.

    An error in the block about an option that came from the file names its line there.

    Args:
        typed: field -> value, or default.
        names: fields that were typed.

    Raises:
        InvalidFile: the file is not TOML, or has a key or value that is none of an option; names file and line.
    """
    file = Path(typed["task"]).parent / FILE
    if not has_usual_options(typed["task"]):
        yield dict(typed)
        return
    text = _read(file)
    found = {name: value for name, value in _values(file, text).items() if name == "option" or name not in names}
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
    return (is_path(task) or bool(Path(task).suffix)) and (Path(task).parent / FILE).is_file()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile(f"cannot read {file}: {error}") from error


def _values(file: Path, text: str) -> dict[str, Any]:
    """The fields that the file sets."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFile(f"{file}: {error}") from error
    options = {one.name: one for one in fields(RunConfig) if description_of(one) and not one.required}
    return dict(_value(file, text, options, key, value) for key, value in table.items())


def _value(file: Path, text: str, options: Mapping[str, FieldInfo], key: str, value: Any) -> tuple[str, Any]:
    name, place = key.replace("-", "_"), f"{file} line {_line(text, key)}"
    if name not in options:
        raise InvalidFile(f"{place}: evener train has no option {key!r}{nearest(name, options)}")
    if name == "token":
        raise InvalidFile(
            f"{place}: a token is for no file beside code: name one that you alone can read, by token_file"
        )
    try:
        return name, field_value(options[name], value, file.parent)
    except InvalidInput as error:
        raise InvalidFile(f"{place}: {key}: {error}") from error


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
