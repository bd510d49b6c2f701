"""The two ends of an authenticated connection: the node's, which blocks, and the master's, which does not.

    connection = open_connection(address, token, Push | Pull)  # connect.py
    connection.send(Push(round=7), [gradients])                # returns when the kernel has all of it
    frame = connection.receive(place=lambda header, lengths: [weights])

One thread may send on a `Connection` while another one receives. Every wait ends within the patience. A `Peer` never
blocks, so a blocking send to it always ends; two blocking ends that send large frames at once would both wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias

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
from evener.wire.sockets import RECEIVES_BLOCK, block_for, waiter
from evener.wire.transport import Transport, explain

_CLOSE_SECONDS = 1.0
_COUNTED_BYTES = 2**20
"""Largest count of a queued frame; larger frames carry weights, which peers may share in memory."""
_MIN_UNACKNOWLEDGED_BYTES = 16 * 1024
"""Fewest unacknowledged bytes that show delivery; heartbeats, which never stop, are shorter."""


class Connection(Generic[H]):
    """A node's end of a connection, with blocking calls. Payload is sent from and received into its memory.

    Args:
        transport: Transport of the frames; its socket is set to block for the patience.
        headers: Type of the headers that may be received.
        limits: Limits of frames, and the patience.
        place: Description of the peer, for errors.
    """

    def __init__(self, transport: Transport, headers: Any, limits: Limits, place: str) -> None:
        self._transport, self._limits, self._place = transport, limits, place
        self._reader: FrameReader[H] = FrameReader(headers, limits)
        self._sequence = 0
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._broken = self._peer_reason = ""
        self._unread: list[H] = []
        self._wait_readable, self._wait_writable = waiter(transport.sock), waiter(transport.sock, to_send=True)
        block_for(transport.sock, limits.patience)

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; its memory may change afterwards.

        Raises:
            ConnectionLost: The connection broke, or nothing moved for the patience; it cannot be used any more.
            InvalidValue: The frame exceeds a limit.
        """
        with self._sending:
            if self._broken:
                raise self._unusable()
            views = encode_frame(self._sequence, header, buffers, self._limits)
            self._sequence += 1
            try:
                self._push(views, self._limits.patience)
            except OSError as error:
                raise self._lost(error, f" while sending {type(header).__name__}", ask_why=True) from error

    def receive(self, place: Place[H] = allocate) -> Frame[H]:
        """Return the next frame; wait for its first byte, and for each further byte, for the patience.

        Args:
            place: Returns the memory of the frame's buffers, given header and lengths; None drops them.

        Raises:
            ConnectionLost: The peer closed the connection, it broke, or nothing came for the patience.
            BadFrame: The bytes are not the expected frame, or `place` refused it.
        """
        with self._receiving:
            if self._broken:
                raise self._unusable()
            self._reader.place = place
            try:
                arrived = self._pull(self._limits.patience)
            except OSError as error:
                raise self._lost(error, " while waiting for a frame") from error
            except BadFrame as error:
                self.close(str(error))
                raise
        if isinstance(arrived, Close):
            self._peer_reason = arrived.reason
            raise self._lost(ConnectionAbortedError(arrived.clause))
        return arrived

    def wait(self, seconds: float) -> bool:
        """Return whether bytes, or the end, have come within `seconds`; `receive` then starts immediately."""
        if self._broken:
            raise self._unusable()
        if self._reader.midway or self._transport.has_unread:
            return True
        return self._wait_readable(seconds)

    def close(self, reason: str = "") -> None:
        """Close the connection, even if a thread waits on it; the peer gets `reason` if it listens."""
        if self._broken:
            return
        self._broken = "it was closed here" + f": {reason}" * bool(reason)
        if self._sending.acquire(blocking=False):  # otherwise a frame is half sent, and nothing can follow it
            with contextlib.suppress(OSError):  # the peer has closed already
                self._push(encode_close(self._sequence, reason), min(_CLOSE_SECONDS, self._limits.patience))
            self._sending.release()
        self._shut()

    def __enter__(self) -> Connection[H]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, views: list[memoryview], patience: float) -> None:
        """Send a whole frame; each piece may wait `patience` seconds for the kernel."""
        transport = self._transport
        while views or transport.has_unsent:
            try:
                drop_sent(views, transport.send(views)) if views else transport.flush()
            except BlockingIOError:
                self._await_room(patience)

    def _await_room(self, patience: float) -> None:
        """Wait until the kernel takes more. Raises TimeoutError if the peer confirms nothing for `patience` seconds."""
        before = self._transport.unacknowledged_bytes
        while not self._wait_writable(patience):
            now = self._transport.unacknowledged_bytes
            if now >= before:
                raise TimeoutError
            before = now

    def _pull(self, patience: float) -> Frame[H] | Close:
        """Return the next frame or the close message; wait up to `patience` seconds for each of its bytes."""
        reader, transport = self._reader, self._transport
        arrived = reader.feed(0) if reader.midway else None
        while arrived is None:
            try:
                count = transport.receive_into(reader.space)
            except BlockingIOError:
                if RECEIVES_BLOCK or not self._wait_readable(patience):
                    raise
                continue
            if not count:
                raise ConnectionResetError("cut off within a frame" if reader.midway else "closed without a reason")
            arrived = reader.feed(count)
        return arrived

    def _unusable(self) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self._place} cannot be used: {self._broken}", self._peer_reason, self._unread
        )

    def _lost(self, error: OSError, when: str = "", *, ask_why: bool = False) -> ConnectionLost:
        """Close without a close message; return the error with the reason."""
        if self._broken:
            return self._unusable()
        is_silent = isinstance(error, TimeoutError | BlockingIOError)
        cause = f"nothing moved for {self._limits.patience:g} s" if is_silent else explain(error)
        self._broken = (self._last_word() if ask_why else "") or cause
        self._shut()
        sentence = f"lost the connection to {self._place}{when}: {self._broken}"
        return ConnectionLost(sentence, self._peer_reason, self._unread)

    def _last_word(self) -> str:
        """Return why the peer has closed, if it said so before it stopped listening."""
        if not self._receiving.acquire(blocking=False):
            return ""
        try:
            self._transport.sock.setblocking(False)
            self._reader.place = lambda *_: None
            while not isinstance(arrived := self._pull(0.0), Close):
                self._unread.append(arrived.header)
            self._peer_reason = arrived.reason
            return arrived.clause
        except (OSError, BadFrame):
            return ""
        finally:
            self._receiving.release()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # already disconnected
            self._transport.sock.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread
        self._transport.sock.close()


_Queued: TypeAlias = tuple[list[memoryview], int, dict[int, int]]
"""A queued frame: the views that remain to be sent, the bytes that count as queued, and its `Peer.large_buffers`."""
_NO_BUFFERS: dict[int, int] = {}


class Peer(Generic[H]):
    """The master's end of a connection: it queues, sends and receives frames without blocking, and detects stalls.

    Args:
        number: Number of the connection.
        transport: Transport on a non-blocking socket.
        reader: Reader of its frames.
        limits: Limits of sent frames and of the queue, and the patience.
        now: Seconds on the server's clock.

    Attributes:
        is_watched: Whether the server waits for the socket to become writable.
    """

    def __init__(self, number: int, transport: Transport, reader: FrameReader[H], limits: Limits, now: float) -> None:
        self.number, self.transport, self.reader = number, transport, reader
        self.is_watched = False
        self._limits = limits
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._sequence = self._confirmed = 0
        self._sent, self._received = Progress(now), Progress(now)

    @property
    def wants_write(self) -> bool:
        """Whether anything waits for the socket to become writable."""
        return bool(self._queue) or self.transport.has_unsent

    def is_delivering(self) -> bool:
        """Return whether frames wait, or more bytes have been confirmed since the last call."""
        if self.wants_write:
            return True
        if (under_way := self.transport.unacknowledged_bytes) < _MIN_UNACKNOWLEDGED_BYTES:
            return False
        before, self._confirmed = self._confirmed, self.transport.wire_bytes_sent - under_way
        return self._confirmed > before

    @property
    def excess_bytes(self) -> int:
        """Queued bytes beyond one frame; see `Limits.queued_bytes`."""
        return max(0, self._queued_bytes - _COUNTED_BYTES)

    @property
    def large_buffers(self) -> dict[int, int]:
        """Bytes of the large buffers of queued frames, by the identity of their memory, which peers may share."""
        return {key: size for _, _, large in self._queue for key, size in large.items()}

    @property
    def num_waiting(self) -> int:
        """Number of queued frames."""
        return len(self._queue)

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer]) -> bool:
        """Send or queue a frame; return whether anything is queued now, whose memory must not change until sent.

        Raises:
            InvalidValue: The frame exceeds a limit.
            BadFrame: Too many frames are queued.
        """
        queue = self._queue
        if len(queue) >= self._limits.queued_frames or self._queued_bytes > self._limits.queued_bytes:
            raise BadFrame(f"it receives too slowly: {len(queue)} frames wait for it, which is the limit")
        views = encode_frame(self._sequence, header, buffers, self._limits)
        counted, large = sum(map(len, views)), _NO_BUFFERS
        if counted > _COUNTED_BYTES:
            counted, large = _COUNTED_BYTES, self._large_of(views)
        queue.append((views, counted, large))
        self._queued_bytes += counted
        self._sequence += 1
        return self.is_watched or self.transmit()

    def _large_of(self, views: Sequence[memoryview]) -> dict[int, int]:
        """Return the large buffers of a frame. Raises BadFrame: they are too many beside those that wait."""
        large, waiting = {id(view.obj): len(view) for view in views if len(view) > _COUNTED_BYTES}, self.large_buffers
        if waiting and len(large | waiting) > max(len(large), self._limits.queued_large_buffers):
            raise BadFrame(f"it receives too slowly: {len(waiting)} large buffers wait for it")
        return large

    def transmit(self) -> bool:
        """Send queued frames while the kernel takes them; return whether anything is queued now."""
        transport, queue = self.transport, self._queue
        try:
            while queue:
                views, counted, _ = queue[0]
                drop_sent(views, transport.send(views))
                if views:
                    return True
                queue.popleft()
                self._queued_bytes -= counted
            if transport.has_unsent:
                transport.flush()
        except BlockingIOError:
            return True
        except OSError:
            queue.clear()
            self._queued_bytes = 0  # the peer is gone; reading gives the reason
        return False

    def send_close(self, reason: str) -> None:
        """Send the reason for closing, unless frames wait for the peer or it does not listen."""
        if not self.wants_write:
            with contextlib.suppress(OSError):
                self.transport.send(encode_close(self._sequence, reason))

    def stalled(self, now: float) -> str:
        """Return why the peer counts as lost at `now`: nothing moved for the patience; empty if it does not."""
        patience, transport = self._limits.patience, self.transport
        arrived = transport.wire_bytes_sent - (transport.unacknowledged_bytes if self.wants_write else 0)
        send_idle = self._sent.idle_seconds(arrived, expected=self.wants_write, now=now)
        receive_idle = self._received.idle_seconds(transport.wire_bytes_received, expected=self.reader.midway, now=now)
        if send_idle > patience:
            return f"it received nothing for {patience:g} s, with {len(self._queue)} frames waiting for it"
        return f"it stopped within a frame for {patience:g} s" if receive_idle > patience else ""
