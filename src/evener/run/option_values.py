"""Options that come as values, of Python or of a file, and not as words: to the fields of a struct."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from evener.errors import InvalidInput


def description_of(one: FieldInfo) -> str:
    """Of a field that is an option; empty for one that is none."""
    return next((note.description or "" for note in _notes(one)), "")


def choices_of(one: FieldInfo) -> tuple[str, ...]:
    """What a field may be, where that is one of some words; empty for another."""
    kind = kind_of(one)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((tuple((note.extra or {}).get("choices", ())) for note in _notes(one)), ())


def kind_of(one: FieldInfo) -> Any:
    """The type of a field, without its description and without None."""
    inner = get_args(one.type)[0] if get_origin(one.type) is Annotated else one.type
    if get_origin(inner) not in (Union, UnionType):
        return inner
    return next(part for part in get_args(inner) if part is not NoneType)


def field_value(one: FieldInfo, value: Any, folder: Path = Path()) -> Any:
    """`value` as the field holds it: numbers and lists of them also where it is text, as in `local_nodes=[1.0, 0.5]`.

    Args:
        one: the field.
        value: of Python's own types.
        folder: from which a path is meant.

    Raises:
        InvalidInput: it is of another type.
    """
    kind = kind_of(one)
    try:
        if kind is Path and isinstance(value, str | Path):
            return folder / Path(value).expanduser()
        return msgspec.convert(_plain(kind, value), Any if get_origin(kind) is Literal else one.type)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error)) from error


def _plain(kind: Any, value: Any) -> Any:
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {name: _text(item, "x") for name, item in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _text(value, ",") if kind is str and (is_number or isinstance(value, list | tuple)) else value


def _text(value: Any, between: str) -> str:
    return between.join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _notes(one: FieldInfo) -> list[Meta]:
    found = get_args(one.type)[1:] if get_origin(one.type) is Annotated else ()
    return [note for note in found if isinstance(note, Meta)]
