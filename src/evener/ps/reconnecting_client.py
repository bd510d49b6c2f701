"""A node's connection to its master, which is made anew whenever it breaks, while the node computes or waits.

Only one thread receives. Every thread may send, and whichever notices first that the connection is broken dials again,
with growing pauses; a thread of its own sends heartbeats, so that a break is noticed while everybody else computes.
What was in flight when it broke may be lost. Over a new connection the node first introduces itself; the master's
`Welcome`, which comes before anything else, is the sign for the node to send again what was not answered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from random import Random

from evener.heartbeat import interval
from evener.ps.messages import MASTER_ENDED, Header, Heartbeat, Join
from evener.wire.connect import JOIN_SECONDS, backoff
from evener.wire.connection import Connection
from evener.wire.errors import BadFrame, CannotJoin, ConnectionLost
from evener.wire.frame import Buffer, Frame, Limits, allocate
from evener.wire.reader import Place

Dial = Callable[[float, float], Connection[Header]]


class ReconnectingClient:
    """A node's connection to its master; close it.

    Args:
        dial: makes a connection within the seconds given, with this patience.
        introduce: makes what the node sends first over every new connection.
        beat: makes what it sends again and again.
        on_break: told why, whenever a connection broke, and when another one stands (with an empty string).

    Raises:
        CannotJoin: the first connection cannot be made.
    """

    def __init__(
        self,
        dial: Dial,
        introduce: Callable[[], Join],
        beat: Callable[[], Heartbeat],
        on_break: Callable[[str], None],
    ) -> None:
        self._dial, self._introduce, self._on_break = dial, introduce, on_break
        self._next_beat = beat
        self._random = Random()
        self._renewing = threading.Lock()
        self._ended = threading.Event()
        self._failure: CannotJoin | None = None
        self.is_over = False
        """Whether the master has said that it will not come back."""
        self.patience = Limits().patience
        """Seconds of silence after which a connection is given up; the master's, once it has said."""
        self._connection = dial(JOIN_SECONDS, self.patience)
        self._connection.send(introduce())
        self._beating = threading.Thread(target=self._beat, name="evener-beat", daemon=True)
        self._beating.start()

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; if the connection breaks, it is lost.

        Raises:
            CannotJoin: the connection broke and can never be made again.
            ConnectionLost: the client was closed, or the master has ended for good.
        """
        connection = self._connection
        try:
            connection.send(header, buffers)
        except ConnectionLost as error:
            self._renew(connection, error)

    def receive(self, place: Place[Header] = allocate) -> Frame[Header]:
        """The next frame, over whichever connection it comes.

        Raises:
            CannotJoin: the connection broke and can never be made again.
            ConnectionLost: the client was closed, or the master has ended for good.
        """
        while True:
            connection = self._connection
            try:
                return connection.receive(place)
            except (ConnectionLost, BadFrame) as error:
                self._renew(connection, error)

    def send_last(self, header: Header) -> None:
        """Send a frame if the connection still takes it."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send(header)

    def has_frame(self) -> bool:
        """Whether `receive` would begin at once."""
        try:
            return self._connection.wait(0)
        except (ConnectionLost, ValueError):  # ValueError: its socket was closed this very moment
            return True  # that it broke is something to be received

    def close(self) -> None:
        """Close the connection for good."""
        self._ended.set()
        self._connection.close()
        self._beating.join()

    def _beat(self) -> None:
        while not self._ended.wait(interval(self.patience)):
            try:
                self.send(self._next_beat())
            except (CannotJoin, ConnectionLost):
                return  # whoever receives is told

    def _renew(self, broken: Connection[Header], why: Exception) -> None:
        """Have another connection than `broken`, unless another thread has made one already."""
        with self._renewing:
            if self._connection is not broken:
                return
            if MASTER_ENDED in str(why):
                self.is_over = True
                self._ended.set()
            if self._failure is None and not self._ended.is_set():
                self._on_break(str(why))
                self._dial_until_it_works(broken)
            if self._failure is not None:
                raise self._failure
            if self._ended.is_set():
                raise why

    def _dial_until_it_works(self, broken: Connection[Header]) -> None:
        broken.close()
        for pause in backoff(self._random):
            if self._ended.wait(pause):
                return
            try:
                connection = self._dial(JOIN_SECONDS, self.patience)
                connection.send(self._introduce())
            except CannotJoin as error:
                if error.lasting:
                    self._failure = error
                    return
            except ConnectionLost:
                pass  # it broke at once: try again
            else:
                self._connection = connection
                self._on_break("")
                return
