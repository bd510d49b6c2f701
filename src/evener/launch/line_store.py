"""The store of a run whose ranks a master started: the master keeps it, and ranks reach it over their channels.

Its values are signed, as in any store (`comm.signed_store`); the master does not interpret them.
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
    """A rank's channel to the coordinator, for generations, answers to beats, and stored values.

    Args:
        say: sends to the coordinator, from any thread.
        hear: waits for its next message. Raises EOFError or OSError if it is gone.
    """

    def __init__(self, say: Callable[[bytes], None], hear: Callable[[], bytes]) -> None:
        self._say, self._hear = say, hear
        self._numbers = count(1)
        self._open: dict[int, SimpleQueue[Values | None]] = {}
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._run, name="evener-line", daemon=True).start()

    def receive(self) -> bytes:
        """Return the next message that is no answer about values; waits. Raises EOFError if the coordinator is gone."""
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message

    def ask(self, make: Callable[[int], SetValue | AskValues], seconds: float) -> Values:
        """Send a request with a number and return its answer. Raises DistStoreError after `seconds`."""
        number, answer = next(self._numbers), SimpleQueue[Values | None]()
        self._open[number] = answer
        self._say(msgspec.msgpack.encode(make(number)))
        try:
            values = answer.get(timeout=seconds)
        except Empty as error:
            raise dist.DistStoreError(f"the store of the ranks did not answer for {seconds:g} s") from error
        finally:
            self._open.pop(number, None)
        if values is None:
            raise dist.DistStoreError("the store of the ranks is gone")
        return values

    def _run(self) -> None:
        try:
            while True:
                data = self._hear()
                message = decode_to_rank(data)
                if not isinstance(message, Values):
                    self._messages.put(data)
                elif (waiting := self._open.get(message.number)) is not None:
                    waiting.put(message)
        except (EOFError, OSError):
            self._messages.put(None)
            for waiting in list(self._open.values()):
                waiting.put(None)


class LineStore:
    """A store over a channel, with the interface of PyTorch's stores.

    Args:
        line: of this rank.
    """

    def __init__(self, line: RankLine) -> None:
        self._line, self._seconds = line, _USUAL.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long to wait for values."""
        return timedelta(seconds=self._seconds)

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._line.ask(lambda number: SetValue(number=number, key=key, value=value), self._seconds)

    def get(self, key: str) -> bytes:
        """Return a value, once it exists."""
        return self._values([key], self._seconds)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these values exist."""
        names = tuple(keys)
        answer = self._line.ask(lambda number: AskValues(number=number, keys=names, waits=False), self._seconds)
        return answer.values is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these values exist."""
        self._values(keys, self._seconds if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for values."""
        self._seconds = timeout.total_seconds()

    def _values(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        names = tuple(keys)
        answer = self._line.ask(lambda number: AskValues(number=number, keys=names, waits=True), seconds)
        assert answer.values is not None
        return answer.values
