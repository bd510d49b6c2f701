"""A node's connection to its master, which is replaced whenever it breaks, while the node computes or waits.

Only one thread receives. Every thread may send, and the first one that notices a break reconnects, with growing pauses.
A separate thread sends heartbeats, so that a break is noticed while the others compute. Frames in flight may be lost at
a break. Over a new connection the node first introduces itself; when the master's `Welcome` arrives, before anything
else, the node sends its unanswered messages again.

With one contribution at a time the node reads between two pieces of work (`Inbox`), without waking threads. If
communication overlaps with work, one thread receives and another one sends meanwhile (`ThreadedInbox`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from evener.ps.protocol.messages import MASTER_ENDED, Dismiss, Header, Heartbeat, Join, Release, ServerReply
from evener.system.heartbeat import interval
from evener.wire.connect import JOIN_SECONDS, backoff
from evener.wire.connection import Connection
from evener.wire.errors import BadFrame, CannotJoin, ConnectionLost
from evener.wire.frame import Buffer, Frame, allocate
from evener.wire.limits import Limits
from evener.wire.reader import Place

Dial = Callable[[float, float], Connection[Header]]
Aside = Callable[[Frame[Header]], bool]

REFUSED_PATIENCES = 8
"""Patiences for which a node retries although the answering process does not know the secret."""


class ReconnectingClient:
    """A node's connection to its master; close it.

    Args:
        dial: connects within a number of seconds, with this patience.
        introduce: makes the first message over every new connection.
        beat: makes the heartbeats.
        on_break: called with the reason when a connection has broken, and with an empty string when another one is
            made.

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
        """Whether the master has ended for good."""
        self.patience = Limits().patience
        """Seconds of silence after which a connection counts as lost; the master's value, once it is known."""
        self._connection = dial(JOIN_SECONDS, self.patience)
        self._connection.send(introduce())
        self._beating = threading.Thread(target=self._beat, name="evener-beat", daemon=True)
        self._beating.start()

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; it is lost if the connection breaks.

        Raises:
            CannotJoin: the connection broke and cannot be replaced.
            ConnectionLost: the client was closed, or the master has ended for good.
        """
        connection = self._connection
        try:
            connection.send(header, buffers)
        except ConnectionLost as error:
            self._renew(connection, error)

    def receive(self, place: Place[Header] = allocate) -> Frame[Header]:
        """Return the next frame, over the present or a new connection.

        Raises:
            CannotJoin: the connection broke and cannot be replaced.
            ConnectionLost: the client was closed, or the master has ended for good.
        """
        while True:
            connection = self._connection
            try:
                return connection.receive(place)
            except (ConnectionLost, BadFrame) as error:
                self._renew(connection, error)

    def send_last(self, header: Header) -> None:
        """Send a frame if the connection still works."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send(header)

    @property
    def is_connected(self) -> bool:
        """Whether no thread is replacing a broken connection."""
        return not self._renewing.locked()

    def has_frame(self) -> bool:
        """Return whether `receive` would return at once."""
        try:
            return self._connection.wait(0)
        except (ConnectionLost, ValueError):  # ValueError: its socket was closed at this moment
            return True  # `receive` reports the break

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
                return  # the receiving thread reports it

    def _renew(self, broken: Connection[Header], why: Exception) -> None:
        """Replace the connection `broken`, unless another thread has done so."""
        with self._renewing:
            if self._connection is not broken:
                return
            if isinstance(why, ConnectionLost) and why.peer_reason == MASTER_ENDED:
                self.is_over = True
                self._ended.set()
            if self._failure is None and not self._ended.is_set():
                self._on_break(str(why))
                self._reconnect(broken)
            if self._failure is not None:
                raise self._failure
            if self._ended.is_set():
                raise why

    def _reconnect(self, broken: Connection[Header]) -> None:
        broken.close()
        refused_since: float | None = None
        for pause in backoff(self._random):
            if self._ended.wait(pause):
                return
            try:
                connection = self._dial(JOIN_SECONDS, self.patience)
                connection.send(self._introduce())
            except CannotJoin as error:
                if not error.lasting:
                    refused_since = None
                    continue
                # The master may restart at any moment; until then any process may answer in its place.
                refused_since = refused_since or time.monotonic()
                if time.monotonic() - refused_since > REFUSED_PATIENCES * self.patience:
                    self._failure = error
                    return
            except ConnectionLost:
                pass  # it broke at once: try again
            else:
                self._connection = connection
                self._on_break("")
                return


_Arrived = Frame[Header] | Exception


class RunEnded(Exception):
    """The run, or this node's part in it, ended during the work."""


class Inbox:
    """Frames for a node.

    Args:
        client: connection to the master.
        aside: handles a frame that does not wait for the end of the work; returns false for any other.
    """

    def __init__(self, client: ReconnectingClient, aside: Aside = lambda _: False) -> None:
        self._client, self._aside = client, aside
        self.waiting: deque[Frame[Header]] = deque()
        """Frames that arrived during the work."""
        self._weights: NDArray[np.uint8] = np.empty(0, np.uint8)

    def receive(self) -> Frame[Header]:
        """Return the next frame; weights in it are valid until the next call."""
        return self.waiting.popleft() if self.waiting else self._client.receive(self._place)

    def check_run(self) -> None:
        """Receive frames between two steps of work, and store them for `receive`.

        Raises:
            RunEnded: the work is no longer needed.
        """
        while self._client.has_frame():
            frame = self._client.receive()
            if not isinstance(frame.header, Heartbeat) and not self._aside(frame):
                self.waiting.append(frame)
        if any(isinstance(frame.header, Release | Dismiss) for frame in self.waiting):
            raise RunEnded

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; return when its memory may be used again."""
        self._client.send(header, buffers)

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def _place(self, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer]:
        """Reuse the same memory for weights."""
        if not isinstance(header, ServerReply) or len(lengths) != 1:
            return allocate(header, lengths)
        if self._weights.size < lengths[0]:
            self._weights = np.empty(lengths[0], np.uint8)
        return [self._weights[: lengths[0]]]


class ThreadedInbox:
    """Frames for a node, received and sent while it computes; close the client first, then this.

    Args:
        client: connection to the master.
        waiting: frames that have arrived already.
        aside: see `Inbox`.
    """

    def __init__(
        self, client: ReconnectingClient, waiting: Iterable[Frame[Header]] = (), aside: Aside = lambda _: False
    ) -> None:
        self._client, self._aside = client, aside
        self._arrived: deque[_Arrived] = deque(waiting)
        self._changed = threading.Condition()
        self._leaving: queue.SimpleQueue[tuple[Header, Sequence[Buffer]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"evener-{name}", daemon=True)
            for name, target in (("receive", self._receive), ("send", self._send))
        ]
        for thread in self._threads:
            thread.start()

    def receive(self) -> Frame[Header]:
        """Return the next frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived)
            arrived = self._arrived.popleft()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def check_run(self) -> None:
        """Check between two steps whether the work is still needed. Raises RunEnded."""
        with self._changed:
            arrived = list(self._arrived)
        if any(isinstance(one, Exception) or isinstance(one.header, Release | Dismiss) for one in arrived):
            raise RunEnded

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a frame; its memory must not change until it is answered."""
        self._leaving.put((header, buffers))

    def close(self) -> None:
        """End the threads."""
        self._leaving.put(None)
        for thread in self._threads:
            thread.join()

    def _receive(self) -> None:
        arrived: _Arrived | None = None
        while not isinstance(arrived, Exception):
            try:
                if self._aside(arrived := self._client.receive()):
                    continue
            except (CannotJoin, ConnectionLost, BadFrame) as error:
                arrived = error
            with self._changed:
                self._arrived.append(arrived)
                self._changed.notify()

    def _send(self) -> None:
        while (frame := self._leaving.get()) is not None:
            try:
                self._client.send(*frame)
            except (CannotJoin, ConnectionLost):
                return  # the receiving thread reports it
