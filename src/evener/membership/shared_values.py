"""Values that the processes of a run leave for each other with its authority, by key: how they find one another.

    process -> authority    SetValue    keep this
                            AskValues   give me these: now, or when all of them are there
    authority -> process    Values      the answer to either

They are small and few, addresses for the most part. What one process asked for again, because it does not know whether
it was heard, is answered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from evener.membership.generation import Beat, Generation, Heard, Hello
from evener.records.errors import InvalidInput
from evener.records.schema import Amount, Part

MOST_BYTES = 64 * 2**20
"""Of all keys and values together."""
MOST_OWN_BYTES = 2 * 2**20
"""Of what one node leaves and asks for."""
MOST_ANSWER_BYTES = 2**20
MOST_QUESTIONS = 256
"""Of one process that wait for values."""
_ENTRY_BYTES = 256
"""That keeping a value or a question takes besides its own bytes."""
Key = Annotated[str, Meta(max_length=1024)]


class SetValue(Part, frozen=True, kw_only=True, tag=True):
    """Keep a value; `number` is that of the answer."""

    number: Amount
    key: Key
    value: bytes


class AskValues(Part, frozen=True, kw_only=True, tag=True):
    """Give the values of `keys`.

    Attributes:
        number: that of the answer.
        keys: whose values.
        waits: whether the answer comes when all are there; else now.
    """

    number: Amount
    keys: tuple[Key, ...]
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
        self._bytes = sum(_size(key, value) for key, value in self.by_key.items())
        self._bytes_of: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._waiting: dict[tuple[int, int], AskValues] = {}

    def answers(self, process: int, message: SetValue | AskValues, owner: str = "") -> Iterator[tuple[int, Values]]:
        """Whom `message` of `process`, on node `owner`, has answered now, and how.

        Raises:
            InvalidInput: the node, or all nodes together, leave or ask for too much.
        """
        if isinstance(message, SetValue):
            self._set(message.key, message.value, owner)
            yield process, Values(number=message.number, values=())
            waiting, self._waiting = self._waiting, {}
            for (other, _), asked in waiting.items():
                yield from self._answer(other, asked)
        else:
            yield from self._answer(process, message)

    def forget(self, process: int) -> None:
        """Nobody answers `process` any more."""
        self._waiting = {key: asked for key, asked in self._waiting.items() if key[0] != process}

    def _set(self, key: str, value: bytes, owner: str) -> None:
        before, size = _size(key, self.by_key[key]) if key in self.by_key else 0, _size(key, value)
        first = self._owners.get(key, owner)
        own = self._bytes_of.get(owner, 0) - (before if first == owner else 0) + size
        if self._bytes - before + size > MOST_BYTES or own > MOST_OWN_BYTES:
            raise InvalidInput(
                f"the ranks leave more than {MOST_BYTES} bytes for each other, or one more than {MOST_OWN_BYTES}"
            )
        if key not in self.by_key:
            self._keep(key, value)
        self._bytes_of[first] = self._bytes_of.get(first, 0) - before
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        self._bytes += size - before
        self._owners[key], self.by_key[key] = owner, value

    def _answer(self, process: int, asked: AskValues) -> Iterator[tuple[int, Values]]:
        found = tuple(self.by_key[key] for key in asked.keys if key in self.by_key)
        if sum(map(len, found)) > MOST_ANSWER_BYTES:
            raise InvalidInput(f"a process asks for more than {MOST_ANSWER_BYTES} bytes at a time")
        is_whole = len(found) == len(asked.keys)
        if is_whole or not asked.waits:
            yield process, Values(number=asked.number, values=found if is_whole else None)
            return
        own = [one for (other, number), one in self._waiting.items() if other == process and number != asked.number]
        size = sum(_size(*one.keys) for one in (*own, asked))
        if len(own) >= MOST_QUESTIONS or size > MOST_ANSWER_BYTES:
            raise InvalidInput(f"more than {MOST_QUESTIONS} questions, or {MOST_ANSWER_BYTES} bytes, of a process wait")
        self._waiting[process, asked.number] = asked  # again, if it did not know whether it was heard


def _size(*parts: str | bytes) -> int:
    """Bytes that keeping these takes."""
    return _ENTRY_BYTES + sum(len(part) for part in parts)
