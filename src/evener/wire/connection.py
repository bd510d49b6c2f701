"""The two ends of a connection that both sides have proved the secret on: a node's, which waits, and the master's.

    connection = open_connection(address, token, Push | Pull)  # connect.py
    connection.send(Push(round=7), [gradients])                # returns when the kernel has all of it
    frame = connection.receive(place=lambda header, lengths: [weights])

Of a `Connection` one thread may send while another one receives; every wait ends within the patience. A `Peer` never
waits, so a blocking send to it always ends; two blocking ends that send large frames at once would both wait.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic

import msgspec

from evener.system.heartbeat import Progress
from evener.wire.errors import BadFrame, ConnectionLost
from evener.wire.frame import (
    Buffer,
    Close,
    Frame,
    H,
    allocate,
    drop_sent,
    encode_close,
    encode_frame,
)
from evener.wire.limits import Limits
from evener.wire.reader import FrameReader, Place
from evener.wire.transport import Transport, block_for, explain

_CLOSE_SECONDS = 1.0
_COUNTED_BYTES = 2**20
"""Of a frame that waits, at most; a larger one brings weights, which lie in memory once for all peers."""
_LEAST_UNDER_WAY = 16 * 1024
"""Bytes in the system's hands that are looked at: heartbeats, which go on whatever a peer does, are shorter."""


class Connection(Generic[H]):
    """A node's end: blocking, payload straight from and into its memory.

    Args:
        transport: over which frames go; its socket is made to block for the patience.
        headers: type of the headers that may be received.
        limits: of frames, and the patience.
        place: of the peer, in words, for errors.
    """

    def __init__(self, transport: Transport, headers: Any, limits: Limits, place: str) -> None:
        self._transport, self._limits, self._place = transport, limits, place
        self._reader: FrameReader[H] = FrameReader(headers, limits)
        self._sequence = 0
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._broken = self._said = ""
        self._unread: list[H] = []
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(transport.sock, select.POLLIN)
        self._writable.register(transport.sock, select.POLLOUT)
        block_for(transport.sock, limits.patience)

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; its memory is not referred to afterwards.

        Raises:
            ConnectionLost: the connection broke, or nothing moved for the patience; it cannot be used any more.
            InvalidValue: the frame exceeds a limit.
        """
        with self._sending:
            if self._broken:
                raise self._unusable()
            views = encode_frame(self._sequence, header, buffers, self._limits)
            self._sequence += 1
            try:
                self._push(views, self._limits.patience)
            except OSError as error:
                raise self._lost(error, f" while {type(header).__name__} was sent", ask_why=True) from error

    def receive(self, place: Place[H] = allocate) -> Frame[H]:
        """The next frame; waits for its first byte, and for every further one, as long as the patience.

        Args:
            place: where its buffers go, given header and lengths; None drops them.

        Raises:
            ConnectionLost: the peer closed the connection, it broke, or nothing came for the patience.
            BadFrame: what came is not the frame that was due, or `place` refused it.
        """
        with self._receiving:
            if self._broken:
                raise self._unusable()
            self._reader.place = place
            try:
                arrived = self._pull()
            except OSError as error:
                raise self._lost(error, " while a frame was awaited") from error
            except BadFrame as error:
                self.close(str(error))
                raise
        if isinstance(arrived, Close):
            self._said = arrived.reason
            raise self._lost(ConnectionAbortedError(arrived.words))
        return arrived

    def wait(self, seconds: float) -> bool:
        """Whether something has come, or the end, within `seconds`; `receive` then begins at once."""
        if self._broken:
            raise self._unusable()
        if self._reader.midway or self._transport.has_unread:
            return True
        return bool(self._readable.poll(max(0.0, seconds) * 1000))

    def close(self, reason: str = "") -> None:
        """Close the connection, also under a thread that waits in it; the peer gets `reason` if it listens."""
        if self._broken:
            return
        self._broken = "it was closed here" + f": {reason}" * bool(reason)
        if self._sending.acquire(blocking=False):  # else a frame is half sent, and nothing can follow it any more
            with contextlib.suppress(OSError):  # the peer is gone already, which is what closing wants
                self._push(encode_close(self._sequence, reason), min(_CLOSE_SECONDS, self._limits.patience))
            self._sending.release()
        self._shut()

    def __enter__(self) -> Connection[H]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, views: list[memoryview], patience: float) -> None:
        """Send all of a frame, whose every piece may wait for `patience` seconds until the kernel takes it."""
        transport = self._transport
        while views or transport.has_unsent:
            try:
                drop_sent(views, transport.send(views)) if views else transport.flush()
            except BlockingIOError:
                self._await_room(patience)

    def _await_room(self, patience: float) -> None:
        """Until the kernel takes more. Raises TimeoutError: the peer has confirmed nothing for `patience` seconds."""
        before = self._transport.unacknowledged_bytes
        while not self._writable.poll(1000 * patience):
            now = self._transport.unacknowledged_bytes
            if now >= before:
                raise TimeoutError
            before = now

    def _pull(self) -> Frame[H] | Close:
        """What comes next."""
        reader, transport = self._reader, self._transport
        arrived = reader.feed(0) if reader.midway else None
        while arrived is None:
            if not (count := transport.receive_into(reader.space)):
                raise ConnectionResetError("cut amid a frame" if reader.midway else "closed without a word")
            arrived = reader.feed(count)
        return arrived

    def _unusable(self) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self._place} cannot be used: {self._broken}", self._said, self._unread
        )

    def _lost(self, error: OSError, when: str = "", *, ask_why: bool = False) -> ConnectionLost:
        """Close without a frame that says so; the error that says why."""
        if self._broken:
            return self._unusable()
        is_silent = isinstance(error, TimeoutError | BlockingIOError)
        cause = f"nothing moved for {self._limits.patience:g} s" if is_silent else explain(error)
        self._broken = (self._last_word() if ask_why else "") or cause
        self._shut()
        sentence = f"lost the connection to {self._place}{when}: {self._broken}"
        return ConnectionLost(sentence, self._said, self._unread)

    def _last_word(self) -> str:
        """Why the peer has closed, if it has said so before it stopped listening."""
        if not self._receiving.acquire(blocking=False):
            return ""
        try:
            self._transport.sock.setblocking(False)
            self._reader.place = lambda *_: None
            while not isinstance(arrived := self._pull(), Close):
                self._unread.append(arrived.header)
            self._said = arrived.reason
            return arrived.words
        except (OSError, BadFrame):
            return ""
        finally:
            self._receiving.release()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self._transport.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        self._transport.sock.close()


class Peer(Generic[H]):
    """The master's end: frames in, a queue of frames out, and whether either has stopped moving. No call waits.

    Args:
        number: of the connection.
        transport: on a non-blocking socket.
        reader: of its frames.
        limits: of frames that are sent, of the queue, and the patience.
        now: seconds on the server's clock.

    Attributes:
        is_watched: whether the server waits for the socket to take more.
    """

    def __init__(self, number: int, transport: Transport, reader: FrameReader[H], limits: Limits, now: float) -> None:
        self.number, self.transport, self.reader = number, transport, reader
        self.is_watched = False
        self._limits = limits
        self._queue: deque[list[memoryview]] = deque()
        self._counted: deque[int] = deque()
        self._queued_bytes = 0
        self._sequence = self._confirmed = 0
        self._sent, self._received = Progress(now), Progress(now)

    @property
    def wants_write(self) -> bool:
        """Whether anything waits for the socket to take more."""
        return bool(self._queue) or self.transport.has_unsent

    def is_delivering(self) -> bool:
        """Whether something waits, or of what the system has taken more has been confirmed than when last asked."""
        if self.wants_write:
            return True
        if (under_way := self.transport.unacknowledged_bytes) < _LEAST_UNDER_WAY:
            return False
        before, self._confirmed = self._confirmed, self.transport.wire_bytes_sent - under_way
        return self._confirmed > before

    @property
    def excess_bytes(self) -> int:
        """That wait for the socket to take more, besides one frame; see `Limits.queued_bytes`."""
        return max(0, self._queued_bytes - _COUNTED_BYTES)

    @property
    def num_waiting(self) -> int:
        """Frames that wait for the socket to take more."""
        return len(self._queue)

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer]) -> bool:
        """Send a frame, or put it into the queue; whether anything waits now, whose memory is referred to until then.

        Raises:
            InvalidValue: the frame exceeds a limit.
            BadFrame: too many frames wait already.
        """
        queue = self._queue
        if len(queue) >= self._limits.queued_frames or self._queued_bytes > self._limits.queued_bytes:
            raise BadFrame(f"it took too little: {len(queue)} frames wait for it, which is the limit")
        views = encode_frame(self._sequence, header, buffers, self._limits)
        queue.append(views)
        self._counted.append(min(sum(map(len, views)), _COUNTED_BYTES))
        self._queued_bytes += self._counted[-1]
        self._sequence += 1
        return self.is_watched or self.transmit()

    def transmit(self) -> bool:
        """Hand frames to the kernel while it takes them whole; whether anything waits now."""
        transport, queue = self.transport, self._queue
        try:
            while queue:
                views = queue[0]
                drop_sent(views, transport.send(views))
                if views:
                    return True
                queue.popleft()
                self._queued_bytes -= self._counted.popleft()
            if transport.has_unsent:
                transport.flush()
        except BlockingIOError:
            return True
        except OSError:
            queue.clear()
            self._counted.clear()
            self._queued_bytes = 0  # the peer is gone; reading will say why, perhaps in its own words
        return False

    def send_close(self, reason: str) -> None:
        """Have the peer know why it is left, unless frames wait for it or it does not listen."""
        if not self.wants_write:
            with contextlib.suppress(OSError):
                self.transport.send(encode_close(self._sequence, reason))

    def stalled(self, now: float) -> str:
        """Why the peer is to be given up at `now`: it took or gave nothing for the patience; else empty."""
        patience, transport = self._limits.patience, self.transport
        arrived = transport.wire_bytes_sent - (transport.unacknowledged_bytes if self.wants_write else 0)
        taken = self._sent.idle_seconds(arrived, expected=self.wants_write, now=now)
        given = self._received.idle_seconds(transport.wire_bytes_received, expected=self.reader.midway, now=now)
        if taken > patience:
            return f"it took nothing for {patience:g} s, with {len(self._queue)} frames waiting for it"
        return f"it stopped amid a frame for {patience:g} s" if given > patience else ""
