"""A node's connection that is made anew when it breaks, with growing pauses, until a time limit.

    line = Reconnecting(lambda seconds: connect(address, token, Weights, seconds=seconds), random=Random(seed))
    while True:
        try:
            line.send(Push(round=7), [gradients])
            frame = line.receive(place)
        except NotDelivered:        # it stands again: say who you are, ask for the round, send anew
            ...

What was in flight when it broke may or may not have arrived, so it is never repeated here; the caller's messages carry
round numbers and can be sent twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Generic, TypeVar

import msgspec

from evener.wire.connection import Connection
from evener.wire.dialling import JOIN_SECONDS
from evener.wire.frame import Buffer, Frame, H, allocate
from evener.wire.reader import OnPart, Place
from evener.wire.refusals import BadFrame, CannotJoin, ConnectionLost, NotDelivered
from evener.wire.traffic import Traffic

T = TypeVar("T")


def pauses(random: Random, first: float = 0.1, longest: float = 10.0) -> Iterator[float]:
    """Seconds to wait before each further try: doubling up to `longest`, each drawn from its upper half."""
    pause = first
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, longest)


class Reconnecting(Generic[H]):
    """A connection to a master that may go away and come back; the first one is made at once, without trying again.

    Args:
        dial: makes a connection within the seconds given.
        random: spreads the tries of many nodes.
        give_up_seconds: after which a broken connection is not tried any more.
        sleep: waits.

    Raises:
        CannotJoin: the first connection cannot be made.
    """

    def __init__(
        self,
        dial: Callable[[float], Connection[H]],
        random: Random,
        give_up_seconds: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._dial, self._random, self._give_up_seconds, self._sleep = dial, random, give_up_seconds, sleep
        self._past = Traffic()
        self._connection = dial(JOIN_SECONDS)

    @property
    def traffic(self) -> Traffic:
        """What went through all connections so far."""
        total = Traffic()
        total.add(self._past)
        total.add(self._connection.traffic)
        return total

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame, as `Connection.send`.

        Raises:
            NotDelivered: the connection broke, and stands again.
            CannotJoin: it broke and cannot be made again.
        """
        self._try(lambda connection: connection.send(header, buffers))

    def receive(self, place: Place[H] = allocate, on_part: OnPart[H] | None = None) -> Frame[H]:
        """The next frame, as `Connection.receive`.

        Raises:
            NotDelivered: the connection broke, and stands again.
            CannotJoin: it broke and cannot be made again.
        """
        return self._try(lambda connection: connection.receive(place, on_part))

    def wait(self, seconds: float) -> bool:
        """Whether `receive` would begin at once, within `seconds`."""
        return self._connection.wait(seconds)

    def close(self, reason: str = "") -> None:
        """Close the connection for good, and tell the master `reason`."""
        self._connection.close(reason)

    def __enter__(self) -> Reconnecting[H]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, action: Callable[[Connection[H]], T]) -> T:
        try:
            return action(self._connection)
        except (ConnectionLost, BadFrame) as error:
            tries = self._renew()
            again = "1 try" if tries == 1 else f"{tries} tries"
            raise NotDelivered(
                f"{error}; it stands again after {again}, what was in flight has to be sent anew"
            ) from error

    def _renew(self) -> int:
        """Dial until it works; how many tries it took."""
        self._past.add(self._connection.traffic)
        until = time.monotonic() + self._give_up_seconds
        for tries, pause in enumerate(pauses(self._random), start=1):
            left = until - time.monotonic()
            try:
                self._connection = self._dial(max(0.0, min(JOIN_SECONDS, left)))
                return tries
            except CannotJoin as error:
                if error.lasting or time.monotonic() + pause > until:
                    raise
            self._sleep(pause)
        raise AssertionError("pauses never end")
