"""What the master sends to a node, in order: read when the node wants it, or by threads of its own while it computes.

With one contribution at a time the node reads between two pieces of work: no thread has to wake another one. If
communication overlaps with work, one thread receives and another one sends meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

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
        line: over which they come.
    """

    def __init__(self, line: ReconnectingClient) -> None:
        self._line = line
        self._waiting: deque[Frame[Header]] = deque()
        self._weights: NDArray[np.uint8] = np.empty(0, np.uint8)

    def next(self) -> Frame[Header]:
        """The next frame; the weights in it are good until the next call."""
        return self._waiting.popleft() if self._waiting else self._line.receive(self._place)

    def look_up(self) -> None:
        """Between two steps of work: see what has come, and keep it for `next`.

        Raises:
            RunEnded: the work is not wanted any more.
        """
        while self._line.has_frame():
            frame = self._line.receive()
            if not isinstance(frame.header, Heartbeat):
                self._waiting.append(frame)
        if any(isinstance(frame.header, Release | Dismiss) for frame in self._waiting):
            raise RunEnded

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; returns when its memory may be used again."""
        self._line.send(header, buffers)

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
    """Frames for a node, received and sent while it computes; close the line first, then this.

    Args:
        line: over which they go.
    """

    def __init__(self, line: ReconnectingClient) -> None:
        self._line = line
        self._arrived: deque[_Arrived] = deque()
        self._news = threading.Condition()
        self._leaving: queue.SimpleQueue[tuple[Header, Sequence[Buffer]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"evener-{name}", daemon=True)
            for name, target in (("receive", self._receive), ("send", self._send))
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Frame[Header]:
        """The next frame."""
        with self._news:
            self._news.wait_for(lambda: self._arrived)
            arrived = self._arrived.popleft()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def look_up(self) -> None:
        """Between two steps of work: see whether it is still wanted. Raises RunEnded."""
        with self._news:
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
                arrived = self._line.receive()
            except (CannotJoin, ConnectionLost) as error:
                arrived = error
            with self._news:
                self._arrived.append(arrived)
                self._news.notify()

    def _send(self) -> None:
        while (frame := self._leaving.get()) is not None:
            try:
                self._line.send(*frame)
            except (CannotJoin, ConnectionLost):
                return  # whoever receives is told
