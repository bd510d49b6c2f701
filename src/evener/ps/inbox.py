"""What the master sends to a node, in order: read when the node wants it, or by threads of its own while it computes.

With one contribution at a time the node reads between two pieces of work: no thread has to wake another one. If
communication overlaps with work, one thread receives and another one sends meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from evener.ps.messages import Dismiss, Header, Heartbeat, Release, ServerReply
from evener.ps.reconnecting_client import ReconnectingClient
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import Buffer, Frame, allocate

_Arrived = Frame[Header] | Exception


class RunEnded(Exception):
    """The run ended, or this node's part in it, amid its work."""


class Inbox:
    """Frames for a node.

    Args:
        client: over which they come.
    """

    def __init__(self, client: ReconnectingClient) -> None:
        self._client = client
        self.waiting: deque[Frame[Header]] = deque()
        """Frames that came amid work."""
        self._weights: NDArray[np.uint8] = np.empty(0, np.uint8)

    def receive(self) -> Frame[Header]:
        """The next frame; the weights in it are good until the next call."""
        return self.waiting.popleft() if self.waiting else self._client.receive(self._place)

    def check_run(self) -> None:
        """Between two steps of work: see what has come, and keep it for `receive`.

        Raises:
            RunEnded: the work is not wanted any more.
        """
        while self._client.has_frame():
            frame = self._client.receive()
            if not isinstance(frame.header, Heartbeat):
                self.waiting.append(frame)
        if any(isinstance(frame.header, Release | Dismiss) for frame in self.waiting):
            raise RunEnded

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; returns when its memory may be used again."""
        self._client.send(header, buffers)

    def close(self) -> None:
        """Nothing runs here."""

    def _place(self, header: Header, lengths: tuple[int, ...]) -> Sequence[Buffer]:
        """Weights go to the same memory again and again."""
        if not isinstance(header, ServerReply) or len(lengths) != 1:
            return allocate(header, lengths)
        if self._weights.size < lengths[0]:
            self._weights = np.empty(lengths[0], np.uint8)
        return [self._weights[: lengths[0]]]


class ThreadedInbox:
    """Frames for a node, received and sent while it computes; close the client first, then this.

    Args:
        client: over which they go.
        waiting: those that have come already.
    """

    def __init__(self, client: ReconnectingClient, waiting: Iterable[Frame[Header]] = ()) -> None:
        self._client = client
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
        """The next frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived)
            arrived = self._arrived.popleft()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def check_run(self) -> None:
        """Between two steps of work: see whether it is still wanted. Raises RunEnded."""
        with self._changed:
            arrived = list(self._arrived)
        if any(isinstance(one, Exception) or isinstance(one.header, Release | Dismiss) for one in arrived):
            raise RunEnded

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Have a frame sent; its memory must be left alone until it is answered."""
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
                arrived = self._client.receive()
            except (CannotJoin, ConnectionLost) as error:
                arrived = error
            with self._changed:
                self._arrived.append(arrived)
                self._changed.notify()

    def _send(self) -> None:
        while (frame := self._leaving.get()) is not None:
            try:
                self._client.send(*frame)
            except (CannotJoin, ConnectionLost):
                return  # whoever receives is told
