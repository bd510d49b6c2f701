"""Decoders of JSON and MessagePack that threads may use.

msgspec collects the fields of a class when one of its decoders first meets it. If two threads do so at once, one uses
the fields before they are complete, and the process crashes (msgspec 0.22). So decoders are made under one lock, and
kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_Data = bytes | bytearray | memoryview
_lock = threading.Lock()
if hasattr(os, "fork"):  # a child of a fork in the middle would find the lock held, and a class half collected
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@cache
def json_decoder(kind: Any, hook: Callable[[type[Any], Any], Any] | None = None) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON of `kind`; `hook` makes values of types that JSON does not have."""
    with _lock:
        return msgspec.json.Decoder(kind, dec_hook=hook)


@cache
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of MessagePack of `kind`."""
    with _lock:
        return msgspec.msgpack.Decoder(kind)


@overload
def decode_json(data: _Data | str | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(data: _Data | str | msgspec.Raw, kind: Any = Any) -> Any: ...
def decode_json(data: _Data | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Decode JSON as a `kind`. Raises msgspec.DecodeError."""
    return json_decoder(kind).decode(data)


@overload
def decode_msgpack(data: _Data, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: _Data, kind: Any = Any) -> Any: ...
def decode_msgpack(data: _Data, kind: Any = Any) -> Any:
    """Decode MessagePack as a `kind`. Raises msgspec.DecodeError."""
    return msgpack_decoder(kind).decode(data)


@overload
def convert(value: Any, kind: type[T], *, has_text_keys: bool = False) -> T: ...
@overload
def convert(value: Any, kind: Any, *, has_text_keys: bool = False) -> Any: ...
def convert(value: Any, kind: Any, *, has_text_keys: bool = False) -> Any:
    """Return a value of plain types as a `kind`; `has_text_keys`: keys are texts, as in JSON.

    Raises:
        msgspec.ValidationError: it is not a `kind`.
    """
    msgpack_decoder(kind)  # its fields are known from here on
    return msgspec.convert(value, kind, str_keys=has_text_keys)
