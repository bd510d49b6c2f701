"""The base of the four nouns: frozen structs that are JSON files with a version, rejected with one clear sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Meta

from evener.records.atomic import atomic_write
from evener.records.bounded_file import read_bounded
from evener.records.decoding import convert, decode_json
from evener.records.errors import InvalidFile, InvalidValue, MissingFile

NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Errors of decoding data that has another type, is not text, or is nested without end."""


MAX_INT = 2**63 - 1
PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\uffff]*\Z"
"""Text without control characters, invisible characters, or characters that change the direction."""
MAX_TEXT_LENGTH = 4000
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A number of anything."""
Whole = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
MAX_AMOUNT = 2**53
Amount = Annotated[int, Meta(ge=-MAX_AMOUNT, le=MAX_AMOUNT)]
"""An integer that a float holds exactly, so that plots can show it."""
Quantity = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
"""An `Amount` that is not negative."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor infinite."""
MAX_LOSS = 1e100
Loss = Annotated[float, Meta(ge=-MAX_LOSS, le=MAX_LOSS)]
"""A loss whose sum over any number of samples is finite."""
MAX_SECONDS = 1e12
MIN_SECONDS = 1e-100
"""Shortest measured time: any quantity divided by it is finite."""
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
UnitSeconds = Annotated[float, Meta(ge=1e-12, le=1e6)]
"""Seconds of a sample."""
MAX_FIXED_SAMPLES = 1e9
FixedSamples = Annotated[float, Meta(ge=0, le=MAX_FIXED_SAMPLES)]
"""Samples that cost as much as the fixed part of a step."""
Word = Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]
Name = Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH, pattern=PRINTABLE)]
"""A few sentences; `shown` makes one from any text."""
MAX_RUN_NAME_LENGTH = 120
RunName = Annotated[str, Meta(max_length=MAX_RUN_NAME_LENGTH, pattern=r"\A(?:[A-Za-z0-9_][A-Za-z0-9_.-]*)?\Z")]
"""Name of a run, and of its folder; empty for none."""
Digest = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")]
"""A SHA-256, hexadecimal; empty for none."""
MAX_FILE_BYTES = 2**28
"""Limit of a JSON file; a record of a million steps has 200 MB."""
_NOT_PLAIN = re.compile(rb"[^\t\n\r\x20-\x5b\x5d-\x7e]")
"""Bytes of JSON that may be unprintable: escapes, and everything beyond ASCII."""
_UNSHOWN = re.compile(PRINTABLE.removeprefix(r"\A").removesuffix(r"*\Z").replace("[^", "[", 1))
_UNSHOWN_IN_JSON = re.compile(_UNSHOWN.pattern.replace(r"\x00-\x1f", r"\x01-\x08\x0b\x0c\x0e-\x1f", 1))
"""The same, without the white space that may stand between values, and without `_PAIR`."""
_SPACE_ESCAPE = re.compile(r"\\[nrt]")
_UNSHOWN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[bf])")
_PAIR = "\0"
"""Placeholder of an escaped backslash while other escapes are replaced."""


def summable(loss: float) -> float | None:
    """Return `loss` as `Loss`; None if it is not finite, or too large."""
    return loss if abs(loss) <= MAX_LOSS else None


def measured(seconds: float) -> float:
    """Return `seconds` as `Seconds` that pass `require_measured`; 0 for fewer than `MIN_SECONDS`."""
    if MIN_SECONDS <= seconds <= MAX_SECONDS:  # as almost always
        return seconds
    return MAX_SECONDS if seconds > MAX_SECONDS else 0.0


def require_measured(owner: object, *fields: str) -> None:
    """Raise InvalidValue unless these fields of `owner` are zero, or seconds by which quantities can be divided."""
    for field in fields:
        value = getattr(owner, field)
        if value != 0 and not value >= MIN_SECONDS:  # also NaN; every message with a time comes here
            raise InvalidValue(field, value, f"zero seconds, or {MIN_SECONDS:g} or more")


def quantity(number: int) -> int:
    """Return the `Quantity` that is nearest to `number`."""
    return number if 0 <= number <= MAX_AMOUNT else min(max(0, number), MAX_AMOUNT)


def printable(text: str) -> str:
    """Return `text` on one line, with question marks instead of unprintable characters."""
    return _UNSHOWN.sub("?", " ".join(text.split())) if _UNSHOWN.search(text) else text


def shown(text: str) -> str:
    """Return `text` as `Text`: printable, on one line, and shortened."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= MAX_TEXT_LENGTH else text[: MAX_TEXT_LENGTH - 4] + " ..."


T = TypeVar("T")


def decode_printable(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Decode a peer's JSON as a `kind` with printable texts, so that it cannot forge lines or control a terminal.

    Raises:
        msgspec.DecodeError: it is not a `kind`.
    """
    return decode_json(data if _NOT_PLAIN.search(data) is None else _printable_json(data), kind)


def _printable_json(data: bytes | memoryview | msgspec.Raw) -> str:
    """Return JSON whose texts are all printable.

    The text itself is edited, since decoding it first without a type would let a peer make objects of 60 times its
    size.

    Raises:
        msgspec.DecodeError: it is not text.
    """
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
    if _PAIR in text:
        raise msgspec.DecodeError("JSON holds no NUL")
    text = text.replace(r"\\", _PAIR)  # so that each remaining backslash begins an escape
    text = _UNSHOWN_ESCAPE.sub("?", _SPACE_ESCAPE.sub(" ", text))
    text = text.replace("\x7f", "?") if text.isascii() else _UNSHOWN_IN_JSON.sub("?", text)
    return text.replace(_PAIR, r"\\")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen struct inside a noun; subclasses validate themselves in `__post_init__` with `require`."""


class Noun(Part, frozen=True, kw_only=True):
    """A frozen struct that is a whole JSON file.

    Attributes:
        version: version of the file format, `FORMAT` of the class; a file of another version is rejected.
    """

    FORMAT: ClassVar[int] = 1
    version: int = 1


N = TypeVar("N", bound=Noun)


def write_noun(noun: Noun, path: Path) -> None:
    """Write `noun` to `path` as indented JSON, atomically."""
    atomic_write(path, encode_noun(noun))


def encode_noun(noun: Noun) -> bytes:
    """Encode `noun` as a JSON file."""
    return msgspec.json.format(msgspec.json.encode(noun), indent=1)


def read_noun(path: Path, kind: type[N], *, makes_printable: bool = False) -> N:
    """Read the noun of type `kind` in the JSON file `path`; `makes_printable` as in `parse_noun`.

    Raises:
        MissingFile: the file does not exist.
        InvalidFile: it is too large, not JSON, of another version, or a field is wrong; names field, value and what is
            allowed.
    """
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from error
    return parse_noun(data, kind, source=str(path), makes_printable=makes_printable)


def parse_noun(data: bytes, kind: type[N], source: str = "the message", *, makes_printable: bool = False) -> N:
    """Parse the noun of type `kind` in JSON `data`.

    Args:
        data: the JSON.
        kind: type of the noun.
        source: origin of the data, for errors.
        makes_printable: whether question marks replace unprintable characters, as in `printable`, instead of an error.

    Raises:
        InvalidFile: it is not JSON, of another version, or a field is wrong.
    """
    try:
        raw = decode_json(_printable_json(data) if makes_printable else data)
    except NOT_DECODED as error:
        raise InvalidFile(f"{source} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidFile(f"{source} must hold a JSON object, got {_short(raw)}")
    if raw.get("version") != kind.FORMAT:
        raise InvalidFile(
            f"{source}: field version is {_short(raw.get('version'))}; "
            f"this Evener reads a {kind.__name__} of version {kind.FORMAT}"
        )
    try:
        return convert(raw, kind, has_text_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidFile(f"{source}: {_sentence(str(error), raw, kind)}") from error


_LOCATION = re.compile(r"^(?P<rule>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$")
_TYPE = re.compile(r"^Expected `([^`]*)`(.*), got ")
_BOUND = re.compile(r"^Expected `([^`]*)` (.*)$")
_RULES = {"matching": "that shows what it is, and is one"}
_CHECK = re.compile(r"^(\w+) must be ")
_STEP = re.compile(r"\.(\w+)|\[([^\]]*)\]")
_TYPE_NAMES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


def _sentence(message: str, raw: Any, kind: type[Noun]) -> str:
    """Return the message of msgspec, or of a `require`, with the field's full name, its value and what is allowed."""
    location = _LOCATION.match(message)
    assert location is not None
    rule, path = location["rule"], location["path"] or "$"
    field = path.removeprefix("$").removeprefix(".")
    got = f"got {_short(_value_at(path, raw))}"
    if match := _MISSING.match(rule):
        return f"field {_within(field, match[1])} is missing"
    if match := _UNKNOWN.match(rule):
        return f"field {_within(field, match[1])} is not known; {_known_fields(path, kind)}"
    if match := _CHECK.match(rule):
        return f"field {_within(field, rule)}"
    if match := _TYPE.match(rule):
        expected = " or ".join(_TYPE_NAMES.get(word, word) for word in match[1].split(" | "))
        return f"{_subject(field)} must be {expected}{match[2]}, {got}"
    if match := _BOUND.match(rule):
        expected = _TYPE_NAMES.get(match[1], match[1])
        return f"{_subject(field)} must be {expected} {_RULES.get(match[2].split()[0], match[2])}, {got}"
    if rule.startswith("Invalid enum value"):
        return f"{_subject(field)} must be one of {_allowed_values(path, kind)}, {got}"
    return f"{_subject(field)}: {rule}" if field else rule


def _subject(field: str) -> str:
    return f"every value of {field.removesuffix('[...]')}" if field.endswith("[...]") else f"field {field}"


def _within(outer: str, field: str) -> str:
    return f"{outer}.{field}" if outer else field


def _value_at(path: str, raw: Any) -> Any:
    """Return the value in decoded JSON `raw` at a msgspec path such as `$.devices[0].cores`."""
    for name, index in _STEP.findall(path):
        if name and isinstance(raw, dict) and name in raw:
            raw = raw[name]
        elif index.isdigit() and isinstance(raw, list):
            raw = raw[int(index)]
        else:
            break
    return raw


def _type_at(path: str, kind: type[Noun]) -> msgspec.inspect.Type:
    """Return the type of the value at a msgspec path."""
    inner = msgspec.inspect.type_info(kind)
    for name, index in _STEP.findall(path):
        if isinstance(inner, msgspec.inspect.UnionType):
            inner = next(one for one in inner.types if not isinstance(one, msgspec.inspect.NoneType))
        if isinstance(inner, msgspec.inspect.StructType):
            inner = next(field.type for field in inner.fields if field.encode_name == name)
        elif isinstance(inner, msgspec.inspect.VarTupleType):
            inner = inner.item_type
        elif isinstance(inner, msgspec.inspect.TupleType):
            inner = inner.item_types[int(index)]
    return inner


def _known_fields(path: str, kind: type[Noun]) -> str:
    struct = _type_at(path, kind)
    if isinstance(struct, msgspec.inspect.UnionType):
        struct = next(one for one in struct.types if isinstance(one, msgspec.inspect.StructType))
    assert isinstance(struct, msgspec.inspect.StructType)
    return f"{struct.cls.__name__} has {', '.join(field.encode_name for field in struct.fields)}"


def _allowed_values(path: str, kind: type[Noun]) -> str:
    literal = _type_at(path, kind)
    assert isinstance(literal, msgspec.inspect.LiteralType)
    return ", ".join(_short(value) for value in literal.values)


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
