"""What the four nouns share: frozen structs that are JSON files with a version, read with one clear sentence on error."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from evener.errors import InvalidFile, MissingFile


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen struct inside a noun; subclasses check themselves in `__post_init__` with `require`."""


class Noun(Part, frozen=True, kw_only=True):
    """A frozen struct that is a whole JSON file.

    Attributes:
        version: of the file format, `FORMAT` of the class; a file of another version is refused.
    """

    FORMAT: ClassVar[int] = 1
    version: int = 1


N = TypeVar("N", bound=Noun)


def write_noun(noun: Noun, path: Path) -> None:
    """Write `noun` to `path` as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(noun), indent=1))


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash at any moment, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_noun(path: Path, kind: type[N]) -> N:
    """The noun of type `kind` in the JSON file `path`.

    Raises:
        MissingFile: there is no such file.
        InvalidFile: it is not JSON, of another version, or a field is wrong; names field, value and what is allowed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from error
    return parse_noun(data, kind, source=str(path))


def parse_noun(data: bytes, kind: type[N], source: str = "the message") -> N:
    """The noun of type `kind` in JSON `data`; `source` names its origin in errors. Raises InvalidFile."""
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"{source} is not JSON: {error}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != kind.FORMAT:
        raise InvalidFile(
            f"{source}: field version is {version!r}; this Evener reads a {kind.__name__} of version {kind.FORMAT}"
        )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{source}: {_sentence(str(error), raw)}") from error


_LOCATION = re.compile(r"^(?P<rule>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


def _sentence(message: str, raw: Any) -> str:
    """Msgspec's message with the field's own name and its value: `field a.b[2] is 'x': expected int, got str`."""
    match = _LOCATION.match(message)
    path = (match and match["path"]) or "$"
    rule = match["rule"] if match else message
    field = path.removeprefix("$").removeprefix(".")
    rule = rule[:1].lower() + rule[1:] if rule.startswith(("Expected", "Object", "Invalid")) else rule
    if not field:
        return rule
    return f"field {field} is {_short(_value_at(path, raw))}: {rule}"


def _value_at(path: str, raw: Any) -> Any:
    """The value in decoded JSON `raw` at a msgspec path such as `$.devices[0].cores`."""
    for name, index in re.findall(r"\.(\w+)|\[([^\]]*)\]", path):
        if name and isinstance(raw, dict) and name in raw:
            raw = raw[name]
        elif index.isdigit() and isinstance(raw, list):
            raw = raw[int(index)]
        else:
            break
    return raw


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
