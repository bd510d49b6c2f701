"""Conversion of options from Python values or a file, instead of text, to the fields of a struct."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from evener.records.decoding import convert
from evener.records.errors import InvalidValue, require

MAX_NUMBER = 2**53
"""Limit of numbers in options, which all arithmetic and all file formats can hold."""


def description_of(one: FieldInfo) -> str:
    """Return the description of a field that is an option; empty for other fields."""
    return next((note.description or "" for note in _notes(one)), "")


def choices_of(one: FieldInfo) -> tuple[str, ...]:
    """Return the allowed words of a field; empty if it is not restricted to words."""
    kind = kind_of(one)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((tuple((note.extra or {}).get("choices", ())) for note in _notes(one)), ())


def kind_of(one: FieldInfo) -> Any:
    """Return the type of a field, without its description and without None."""
    inner = get_args(one.type)[0] if get_origin(one.type) is Annotated else one.type
    if get_origin(inner) not in (Union, UnionType):
        return inner
    return next(part for part in get_args(inner) if part is not NoneType)


def field_value(one: FieldInfo, value: Any, folder: Path = Path()) -> Any:
    """Convert `value` to the type of the field; numbers and their lists may become text, as in `local_nodes=[1.0,
    0.5]`.

    Args:
        one: field of the option.
        value: value of a basic Python type.
        folder: folder that a path is relative to.

    Raises:
        InvalidValue: the value has another type, or is too large a number.
    """
    kind = kind_of(one)
    try:
        if kind is Path and isinstance(value, str | Path):
            return folder / Path(value).expanduser()
        expected = str | None if get_origin(kind) is Literal else one.type  # the struct itself checks a choice
        converted = convert(_plain(kind, value), expected)
    except msgspec.ValidationError as error:
        raise InvalidValue(one.name, value, _allowed(one)) from error
    require_moderate(one.name, converted)
    return converted


def require_moderate(name: str, value: Any) -> None:
    """Raise InvalidValue for an infinite or too large number of the option `name`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        require(abs(value) <= MAX_NUMBER, name, value, "a number of at most 2^53")


def _allowed(one: FieldInfo) -> str:
    """Describe the allowed values of a field."""
    if choices := choices_of(one):
        return f"one of {', '.join(choices)}"
    kind = kind_of(one)
    return _KINDS.get(kind) or _KINDS[get_origin(kind)]


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text, a number, or a list of these",
    Path: "the name of a file or folder, as text",
    dict: "a table of names and values, such as { width = 64 }",
    tuple: "a list of texts",
}


def _plain(kind: Any, value: Any) -> Any:
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {name: _text(item, "x") for name, item in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _text(value, ",") if kind is str and (is_number or isinstance(value, list | tuple)) else value


def _text(value: Any, between: str) -> str:
    return between.join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _notes(one: FieldInfo) -> list[Meta]:
    annotations = get_args(one.type)[1:] if get_origin(one.type) is Annotated else ()
    return [note for note in annotations if isinstance(note, Meta)]
