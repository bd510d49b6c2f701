"""No field without bounds: what its type does not allow, the decoder refuses, and no handler ever sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect as mi
import pytest

from evener.ps.protocol.directions import ToCommand, ToMaster, ToNode
from evener.ps.protocol.job import Job
from evener.records.schema import MAX_TEXT_LENGTH, PRINTABLE, shown


def unbounded(kind: mi.Type, path: str) -> Iterator[str]:
    """Fields of `kind` that may be anything."""
    if isinstance(kind, mi.StructType):
        for field in kind.fields:
            yield from unbounded(field.type, f"{path}.{field.name}")
    elif isinstance(kind, mi.UnionType):
        for one in kind.types:
            yield from unbounded(one, f"{path}.{one.cls.__name__}" if isinstance(one, mi.StructType) else path)
    elif isinstance(kind, mi.VarTupleType | mi.ListType):
        yield from unbounded(kind.item_type, f"{path}[]")
    elif isinstance(kind, mi.TupleType):
        for one in kind.item_types:
            yield from unbounded(one, f"{path}[]")
    elif isinstance(kind, mi.DictType):
        yield from unbounded(kind.key_type, f"{path} key")
        yield from unbounded(kind.value_type, f"{path} value")
    elif isinstance(kind, mi.StrType):
        if kind.max_length is None and kind.pattern is None:
            yield path
    elif isinstance(kind, mi.BytesType):
        if kind.max_length is None:
            yield path
    elif isinstance(kind, mi.IntType | mi.FloatType):
        if kind.le is None or (kind.ge is None and kind.gt is None):
            yield path
    elif not isinstance(kind, mi.BoolType | mi.NoneType | mi.LiteralType):
        yield f"{path}: {kind}"


@pytest.mark.parametrize("kind", [ToMaster, ToNode, ToCommand, Job], ids=["to master", "to node", "to command", "job"])
def test_every_message_field_is_bounded_by_its_type(kind: Any) -> None:
    assert list(unbounded(mi.type_info(kind), "")) == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a sentence", "a sentence"),
        ("two\nlines\tand a tab", "two lines and a tab"),
        ("\x1b[2Jgone\u202etxt.exe\x00", "?[2Jgone?txt.exe?"),
        ("é 漢字 🙂", "é 漢字 🙂"),
        ("x" * 5000, "x" * (MAX_TEXT_LENGTH - 4) + " ..."),
    ],
)
def test_any_text_becomes_printable(text: str, wanted: str) -> None:
    import re

    assert shown(text) == wanted
    assert re.search(PRINTABLE, shown(text))
