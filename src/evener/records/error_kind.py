"""The class and the fields of an error, as they are sent from the process where it arose to the one that handles it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from evener.records.decoding import decode_msgpack
from evener.records.errors import CannotWrite, EvenerError, Interrupted, is_of_the_disk
from evener.records.schema import Part, Word, shown

_MAX_KINDS = 8
_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 2**12
"""Limit of an encoded field; a larger one is not sent."""
_Field = Annotated[bytes, Meta(max_length=_MAX_FIELD_BYTES)]


class ErrorKind(Part, frozen=True, kw_only=True):
    """Class and fields of an error, without its sentence.

    Attributes:
        kinds: names of its class and of the base classes. A process that does not know the first, because it has not
            loaded it or is of another version, takes the next.
        fields: its fields by name, each encoded as MessagePack.
    """

    kinds: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=_MAX_KINDS)]
    fields: Annotated[dict[Word, _Field], Meta(max_length=_MAX_FIELDS)] = {}

    def as_error(self, sentence: str) -> EvenerError:
        """Return an error of this kind with `sentence`; fields of a wrong type keep the default of the class."""
        kind = _known(self.kinds)
        error = kind.__new__(kind, sentence)
        Exception.__init__(error, sentence)
        for name, hint in _fields_of(kind):
            if name in self.fields:
                try:
                    setattr(error, name, _printable(decode_msgpack(self.fields[name], hint)))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
                    continue
        return error


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of `error`; for an error that is not Evener's, `EvenerError`."""
    if isinstance(error, KeyboardInterrupt):
        return ErrorKind(kinds=_names(Interrupted))
    if not isinstance(error, EvenerError):
        return ErrorKind(kinds=_names(CannotWrite if is_of_the_disk(error) else EvenerError))
    fields = {}
    for name, _ in _fields_of(type(error)):
        data = _encoded(getattr(error, name))
        if len(data) <= _MAX_FIELD_BYTES:
            fields[name] = data
    return ErrorKind(kinds=_names(type(error)), fields=fields)


def restated(error: EvenerError, sentence: str) -> EvenerError:
    """Return an error with the class and the fields of `error`, and with `sentence`."""
    return kind_of(error).as_error(sentence)


def _names(kind: type[EvenerError]) -> tuple[str, ...]:
    return tuple(one.__name__ for one in kind.__mro__ if issubclass(one, EvenerError))[-_MAX_KINDS:]


def _known(names: tuple[str, ...]) -> type[EvenerError]:
    """Return the first of the classes that this process has."""
    known = {kind.__name__: kind for kind in _all_below(EvenerError)}
    return next((known[name] for name in names if name in known), EvenerError)


def _all_below(kind: type[EvenerError]) -> Iterator[type[EvenerError]]:
    yield kind
    for lower in kind.__subclasses__():
        yield from _all_below(lower)


def _fields_of(kind: type[EvenerError]) -> Iterator[tuple[str, Any]]:
    """Yield name and type of every field of the class and its base classes."""
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is not ClassVar:
            yield name, hint


def _encoded(value: Any) -> bytes:
    """Encode `value` as MessagePack, or a description of it if that is not possible."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return msgspec.msgpack.encode(_described(value))


def _printable(value: Any) -> Any:
    """Return `value` with printable text, since values from other machines are shown on a terminal."""
    if isinstance(value, tuple):
        return tuple(_printable(one) for one in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return shown(value) if isinstance(value, str) else value


def _described(value: Any) -> str:
    return shown(repr(value))
