"""The store of a run whose ranks were started by a master: it is kept there, and reached over each rank's line.

Made to be signed, as any other (`comm.signed_store`): the master keeps what it cannot read a meaning into.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue

import msgspec
import torch.distributed as dist

from evener.membership.shared_values import AskValues, SetValue, Values, decode_to_rank

_USUAL = timedelta(seconds=1800)


class RankLine:
    """What a rank says to the authority, and hears of it: generations, answers to beats, and values that are kept.

    Args:
        say: to the authority, from any thread.
        hear: waits for its next words. Raises EOFError or OSError when it is gone.
    """

    def __init__(self, say: Callable[[bytes], None], hear: Callable[[], bytes]) -> None:
        self._say, self._hear = say, hear
        self._numbers = count(1)
        self._open: dict[int, SimpleQueue[Values | None]] = {}
        self._words: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._run, name="evener-line", daemon=True).start()

    def receive(self) -> bytes:
        """The next words that are no answer about values; waits. Raises EOFError when the authority is gone."""
        words = self._words.get()
        if words is None:
            raise EOFError
        return words

    def ask(self, make: Callable[[int], SetValue | AskValues], seconds: float) -> Values:
        """The answer to a question that is made with a number. Raises DistStoreError: it does not come in time."""
        number, answer = next(self._numbers), SimpleQueue[Values | None]()
        self._open[number] = answer
        self._say(msgspec.msgpack.encode(make(number)))
        try:
            found = answer.get(timeout=seconds)
        except Empty as error:
            raise dist.DistStoreError(f"the store of the ranks did not answer for {seconds:g} s") from error
        finally:
            self._open.pop(number, None)
        if found is None:
            raise dist.DistStoreError("the store of the ranks is gone")
        return found

    def _run(self) -> None:
        try:
            while True:
                data = self._hear()
                message = decode_to_rank(data)
                if not isinstance(message, Values):
                    self._words.put(data)
                elif (waiting := self._open.get(message.number)) is not None:
                    waiting.put(message)
        except (EOFError, OSError):
            self._words.put(None)
            for waiting in list(self._open.values()):
                waiting.put(None)


class LineStore:
    """A store behind a line, as PyTorch's are used.

    Args:
        line: of this rank.
    """

    def __init__(self, line: RankLine) -> None:
        self._line, self._seconds = line, _USUAL.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long values are waited for."""
        return timedelta(seconds=self._seconds)

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        self._line.ask(lambda number: SetValue(number=number, key=key, value=value), self._seconds)

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._values([key], self._seconds)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these values are there."""
        asked = tuple(keys)
        found = self._line.ask(lambda number: AskValues(number=number, keys=asked, waits=False), self._seconds)
        return found.values is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these values are there."""
        self._values(keys, self._seconds if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """How long values are waited for."""
        self._seconds = timeout.total_seconds()

    def _values(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        asked = tuple(keys)
        found = self._line.ask(lambda number: AskValues(number=number, keys=asked, waits=True), seconds)
        assert found.values is not None
        return found.values
