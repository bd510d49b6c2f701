"""Messages with one field, or all of them, at the smallest or the largest value that their types allow.

A change belongs to a path of fields, so that it can be made to any message of a class; what the decoder would refuse is
no change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
import msgspec.inspect as mi
from msgspec.structs import replace

TEXTS = ("", "é漢🙂\u00a0\U000e0041x", "a\ufffdb")
_SMALLEST, _LARGEST = 0, -1
KEPT = frozenset({"protocol", "run", "number", "process", "digest", "offset", "total", "version", "is_late", "plan"})
"""Fields that say what a message belongs to: with another value the master ignores it."""

FieldPath: TypeAlias = tuple[str | int, ...]
"""Names of fields and indices, from the outside."""


class Change(NamedTuple):
    """Values of fields, each by its path.

    Attributes:
        name: of the change, for a test's name.
        fields: path and value of each field.
    """

    name: str
    fields: tuple[tuple[FieldPath, Any], ...]

    def of(self, message: Any) -> Any:
        """Return `message` with those of the fields that it has and that may have these values."""
        for path, value in self.fields:
            changed = _put(message, path, value)
            message = changed if changed is not None and is_allowed(changed) else message
        return message


def is_allowed(message: Any) -> bool:
    """Return whether a message decodes."""
    try:
        msgspec.json.decode(msgspec.json.encode(message), type=type(message))
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


def changes(message: Any) -> list[Change]:
    """Return every change of one field of `message`, and those of all fields to the smallest and the largest values."""
    fields = [(path, values) for path, values in _fields(message, mi.type_info(type(message)), ())]
    single = [
        Change(f"{'.'.join(map(str, path))}={_short(value)}", ((path, value),))
        for path, values in fields
        for value in values
        if (changed := _put(message, path, value)) is not None and changed != message and is_allowed(changed)
    ]
    ends = [
        Change(name, tuple((path, values[end]) for path, values in fields if values))
        for name, end in (("smallest", _SMALLEST), ("largest", _LARGEST))
    ]
    return [*single, *ends]


def _fields(
    value: Any, kind: mi.Type, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], list[Any]]]:
    """Yield the path of each field within `value`, with the values at the ends of its type, in order."""
    if isinstance(kind, mi.UnionType):
        structs = [one for one in kind.types if isinstance(one, mi.StructType) and type(value) is one.cls]
        if structs:
            yield from _fields(value, structs[0], path)
        else:
            yield path, [end for one in kind.types for end in _ends(one)]
    elif isinstance(kind, mi.StructType):
        for field in kind.fields:
            if field.name not in KEPT:
                yield from _fields(getattr(value, field.name), field.type, (*path, field.name))
    elif isinstance(kind, mi.VarTupleType | mi.ListType | mi.TupleType):
        for number, one in enumerate(value):
            inner = kind.item_types[number] if isinstance(kind, mi.TupleType) else kind.item_type
            yield from _fields(one, inner, (*path, number))
    else:
        yield path, _ends(kind)


def _ends(kind: mi.Type) -> list[Any]:
    if isinstance(kind, mi.IntType):
        return sorted({kind.ge or 0, 0, 1, 2**63 - 1 if kind.le is None else kind.le})
    if isinstance(kind, mi.FloatType):
        small = kind.ge if kind.gt is None else math.nextafter(kind.gt, math.inf)
        return sorted({-math.inf if small is None else small, 5e-324, 1.0, math.inf if kind.le is None else kind.le})
    if isinstance(kind, mi.StrType):
        length = kind.max_length or 64
        texts = (*TEXTS, "0" * 64, "x" * length)
        return [one for one in texts if len(one) <= length and re.search(kind.pattern or "", one)]
    if isinstance(kind, mi.LiteralType):
        return list(kind.values)
    if isinstance(kind, mi.BytesType):
        return [b"", b"\xff"]
    return [False, True] if isinstance(kind, mi.BoolType) else []


def _put(value: Any, path: FieldPath, new: Any) -> Any:
    """Return `value` with another value at `path`; None if it has no such field, or may not have that value."""
    if not path:
        return new
    at, rest = path[0], path[1:]
    try:
        inner = _put(value[at] if isinstance(at, int) else getattr(value, at), rest, new)
        if inner is None and rest:
            return None
        if isinstance(at, int):
            return type(value)([*value[:at], inner, *value[at + 1 :]])
        return replace(value, **{at: inner})
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 24 else f"{text[:20]}...{len(text)}"
