"""Values by key that the coordinator stores for the processes of a run, such as their addresses.

    process -> coordinator    SetValue    store a value
                              AskValues   return values, at once or when all of them exist
    coordinator -> process    Values      the answer to either

A repeated request, of a process that does not know whether the first one arrived, is answered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, TypeAlias

from msgspec import Meta

from evener.membership.generation import ToCoordinator, ToProcess
from evener.records.decoding import msgpack_decoder
from evener.records.errors import InvalidInput
from evener.records.schema import Amount, Part

MAX_BYTES = 64 * 2**20
"""Limit of all keys and values together."""
MAX_NODE_BYTES = 2 * 2**20
"""Limit of the values of one node."""
MAX_ANSWER_BYTES = 2**20
MAX_QUESTIONS = 256
"""Waiting requests of one process."""
_ENTRY_BYTES = 256
"""Overhead of a stored value or request."""
Key = Annotated[str, Meta(max_length=1024)]


class SetValue(Part, frozen=True, kw_only=True, tag=True):
    """A request to store a value; `number` is that of the answer."""

    number: Amount
    key: Key
    value: bytes


class AskValues(Part, frozen=True, kw_only=True, tag=True):
    """A request for the values of `keys`.

    Attributes:
        number: of the answer.
        keys: of the values.
        waits: whether to answer when all values exist, instead of at once.
    """

    number: Amount
    keys: tuple[Key, ...]
    waits: bool


class Values(Part, frozen=True, kw_only=True, tag=True):
    """The answer to the request of this `number`; None if values are missing."""

    number: Amount
    values: tuple[bytes, ...] | None


FromRank: TypeAlias = ToCoordinator | SetValue | AskValues
ToRank: TypeAlias = ToProcess | Values
_from_rank = msgpack_decoder(FromRank)
_to_rank = msgpack_decoder(ToRank)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Decode a message of a process to a coordinator that stores values. Raises msgspec.DecodeError."""
    message: FromRank = _from_rank.decode(data)
    return message


def decode_to_rank(data: bytes | memoryview) -> ToRank:
    """Decode a message of such a coordinator. Raises msgspec.DecodeError."""
    message: ToRank = _to_rank.decode(data)
    return message


class SharedValues:
    """The values of one run.

    Args:
        keep: called with key and value of every new value, before its answer.
        stored: values from before a restart.

    Attributes:
        by_key: all values.
    """

    def __init__(
        self, keep: Callable[[str, bytes], None] = lambda _key, _value: None, stored: Mapping[str, bytes] | None = None
    ) -> None:
        self.by_key = dict(stored or {})
        self._keep = keep
        self._bytes = sum(_size(key, value) for key, value in self.by_key.items())
        self._bytes_of: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._waiting: dict[tuple[int, int], AskValues] = {}

    def answers(self, process: int, message: SetValue | AskValues, owner: str = "") -> Iterator[tuple[int, Values]]:
        """Yield (process, answer) for all requests that `message` of `process`, on node `owner`, completes.

        Raises:
            InvalidInput: the values or requests of the node, or of all nodes, are too large.
        """
        if isinstance(message, SetValue):
            self._set(message.key, message.value, owner)
            yield process, Values(number=message.number, values=())
            waiting, self._waiting = self._waiting, {}
            for (other, _), request in waiting.items():
                yield from self._answer(other, request)
        else:
            yield from self._answer(process, message)

    def forget(self, process: int) -> None:
        """Drop the waiting requests of `process`."""
        self._waiting = {key: request for key, request in self._waiting.items() if key[0] != process}

    def _set(self, key: str, value: bytes, owner: str) -> None:
        before, size = _size(key, self.by_key[key]) if key in self.by_key else 0, _size(key, value)
        first = self._owners.get(key, owner)
        total = self._bytes_of.get(owner, 0) - (before if first == owner else 0) + size
        if self._bytes - before + size > MAX_BYTES or total > MAX_NODE_BYTES:
            raise InvalidInput(
                f"the ranks store more than {MAX_BYTES} bytes for each other, or one more than {MAX_NODE_BYTES}"
            )
        if key not in self.by_key:
            self._keep(key, value)
        self._bytes_of[first] = self._bytes_of.get(first, 0) - before
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        self._bytes += size - before
        self._owners[key], self.by_key[key] = owner, value

    def _answer(self, process: int, request: AskValues) -> Iterator[tuple[int, Values]]:
        values = tuple(self.by_key[key] for key in request.keys if key in self.by_key)
        if sum(map(len, values)) > MAX_ANSWER_BYTES:
            raise InvalidInput(f"a process asks for more than {MAX_ANSWER_BYTES} bytes at a time")
        is_whole = len(values) == len(request.keys)
        if is_whole or not request.waits:
            yield process, Values(number=request.number, values=values if is_whole else None)
            return
        waiting = self._waiting.items()
        others = [one for (other, number), one in waiting if other == process and number != request.number]
        size = sum(_size(*one.keys) for one in (*others, request))
        if len(others) >= MAX_QUESTIONS or size > MAX_ANSWER_BYTES:
            raise InvalidInput(f"more than {MAX_QUESTIONS} questions, or {MAX_ANSWER_BYTES} bytes, of a process wait")
        self._waiting[process, request.number] = request  # replaces a repeated one


def _size(*parts: str | bytes) -> int:
    """Return the bytes that storing these values takes."""
    return _ENTRY_BYTES + sum(len(part) for part in parts)
