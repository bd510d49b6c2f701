"""Values that the processes of a run leave for each other with its authority, by key: how they find one another.

    process -> authority    SetValue    keep this
                            AskValues   give me these: now, or when all of them are there
    authority -> process    Values      the answer to either

They are small and few, addresses for the most part. What one process asked for again, because it does not know whether
it was heard, is answered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from evener.elastic.generation import Beat, Generation, Heard, Hello
from evener.errors import InvalidInput
from evener.schema import Amount, Part

MOST_BYTES = 64 * 2**20
"""Of all keys and values together."""


class SetValue(Part, frozen=True, kw_only=True, tag=True):
    """Keep a value; `number` is that of the answer."""

    number: Amount
    key: str
    value: bytes


class AskValues(Part, frozen=True, kw_only=True, tag=True):
    """Give the values of `keys`.

    Attributes:
        number: that of the answer.
        keys: whose values.
        waits: whether the answer comes when all are there; else now.
    """

    number: Amount
    keys: tuple[str, ...]
    waits: bool


class Values(Part, frozen=True, kw_only=True, tag=True):
    """The answer to what had this `number`; None: not all are there."""

    number: Amount
    values: tuple[bytes, ...] | None


FromRank: TypeAlias = Hello | Beat | SetValue | AskValues
ToRank: TypeAlias = Generation | Heard | Values
_from_rank = msgspec.msgpack.Decoder(FromRank)
_to_rank = msgspec.msgpack.Decoder(ToRank)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """What a process said to an authority that keeps values, too. Raises msgspec.DecodeError."""
    message: FromRank = _from_rank.decode(data)
    return message


def decode_to_rank(data: bytes | memoryview) -> ToRank:
    """What such an authority said. Raises msgspec.DecodeError."""
    message: ToRank = _to_rank.decode(data)
    return message


class SharedValues:
    """The values of one run.

    Args:
        keep: called with the key and value of each that is new, before anybody is answered.
        found: those that were left before.

    Attributes:
        by_key: all of them.
    """

    def __init__(
        self, keep: Callable[[str, bytes], None] = lambda _key, _value: None, found: Mapping[str, bytes] | None = None
    ) -> None:
        self.by_key = dict(found or {})
        self._keep = keep
        self._bytes = sum(len(key) + len(value) for key, value in self.by_key.items())
        self._waiting: list[tuple[int, AskValues]] = []

    def answers(self, process: int, message: SetValue | AskValues) -> Iterator[tuple[int, Values]]:
        """Whom `message` of `process` has answered now, and how. Raises InvalidInput: there are too many values."""
        if isinstance(message, SetValue):
            self._set(message.key, message.value)
            yield process, Values(number=message.number, values=())
            waiting, self._waiting = self._waiting, []
            for other, asked in waiting:
                yield from self._answer(other, asked)
        else:
            yield from self._answer(process, message)

    def forget(self, process: int) -> None:
        """Nobody answers `process` any more."""
        self._waiting = [(one, asked) for one, asked in self._waiting if one != process]

    def _set(self, key: str, value: bytes) -> None:
        before = len(key) + len(self.by_key[key]) if key in self.by_key else 0
        size = self._bytes - before + len(key) + len(value)
        if size > MOST_BYTES:
            raise InvalidInput(f"the ranks leave more than {MOST_BYTES} bytes for each other")
        if key not in self.by_key:
            self._keep(key, value)
        self._bytes, self.by_key[key] = size, value

    def _answer(self, process: int, asked: AskValues) -> Iterator[tuple[int, Values]]:
        found = tuple(self.by_key[key] for key in asked.keys if key in self.by_key)
        is_whole = len(found) == len(asked.keys)
        if is_whole or not asked.waits:
            yield process, Values(number=asked.number, values=found if is_whole else None)
        else:
            self._waiting.append((process, asked))
