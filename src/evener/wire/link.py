"""One welcome connection of the hub: frames in, a queue of frames out, and whether either has stopped moving."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic

import msgspec

from evener.wire.channel import CHUNK, Channel
from evener.wire.frame import Buffer, Frame, Goodbye, H
from evener.wire.limits import Limits
from evener.wire.outgoing import Outgoing, goodbye, message
from evener.wire.progress import Progress
from evener.wire.reader import FrameReader
from evener.wire.refusals import BadFrame
from evener.wire.traffic import Traffic, count


class Link(Generic[H]):
    """A connection that has proved the secret; no call of it waits.

    Args:
        peer: its number.
        channel: on a non-blocking socket.
        reader: of its frames.
        limits: of frames that are sent, of the queue, and the patience.
        now: seconds on the hub's clock.

    Attributes:
        is_watched: whether the hub waits for the socket to take more.
        has_more: whether `receive` has to be called again although the socket may have nothing new.
    """

    def __init__(self, peer: int, channel: Channel, reader: FrameReader[H], limits: Limits, now: float) -> None:
        self.peer, self.channel = peer, channel
        self.is_watched = self.has_more = False
        self._reader, self._limits = reader, limits
        self._queue: deque[Outgoing] = deque()
        self._sequence = 0
        self._taking, self._giving = Progress(now), Progress(now)
        self._began = now
        self._traffic = Traffic()

    @property
    def wants_write(self) -> bool:
        """Whether anything waits for the socket to take more."""
        return bool(self._queue) or self.channel.has_unsent

    @property
    def traffic(self) -> Traffic:
        """What went through so far."""
        self._traffic.wire_bytes_sent = self.channel.wire_bytes_sent
        self._traffic.wire_bytes_received = self.channel.wire_bytes_received
        return self._traffic

    def receive(self) -> Iterator[Frame[H] | Goodbye]:
        """Frames that became whole, from about a megabyte at most, so that nobody keeps the others waiting.

        Raises:
            BadFrame: what came is not the frame that was due, or was refused.
            OSError: the connection broke or ended.
        """
        reader, channel, received = self._reader, self.channel, 0
        self.has_more = False
        while received < CHUNK:
            if not reader.midway:
                self._began = time.monotonic()
            space = reader.space()
            try:
                size = channel.receive_into(space)
            except BlockingIOError:
                return
            if size == 0:
                raise ConnectionResetError("cut amid a frame" if reader.midway else "it left without a word")
            reader.filled(size)
            received += size
            while (arrived := reader.frame()) is not None:
                yield self._counted(arrived)
                if not reader.midway:
                    break
            if not channel.has_unread and (size < len(space) or not reader.midway):
                return
        self.has_more = channel.has_unread

    def enqueue(self, header: msgspec.Struct, buffers: Sequence[Buffer]) -> None:
        """Put a frame into the queue; its memory is referred to until `transmit` gives its header back.

        Raises:
            InvalidValue: the frame exceeds a limit.
            BadFrame: too many frames wait already.
        """
        if len(self._queue) >= self._limits.queued_frames:
            raise BadFrame(f"it took too little: {len(self._queue)} frames wait for it, which is the limit")
        self._queue.append(message(self._sequence, header, buffers, self._limits))
        self._sequence += 1

    def transmit(self) -> Iterator[msgspec.Struct]:
        """Hand frames to the kernel while it takes them whole; the headers of those that have left our memory."""
        channel, queue = self.channel, self._queue
        try:
            while queue:
                frame = queue[0]
                frame.started = frame.started or time.monotonic()
                frame.advance(channel.send(frame.views))
                if frame.views:
                    return
                queue.popleft()
                seconds = time.monotonic() - frame.started
                count(self._traffic.sent, frame.header, frame.payload_bytes, frame.frame_bytes, seconds)
                yield frame.header
            channel.flush()
        except BlockingIOError:
            return
        except OSError:
            queue.clear()  # the peer is gone; reading will say why, perhaps in its own words

    def say_goodbye(self, reason: str) -> None:
        """Tell the peer why it is left, unless frames wait for it or it does not listen."""
        if not self.wants_write:
            with contextlib.suppress(OSError):
                self.channel.send(goodbye(self._sequence, reason).views)

    def stalled(self, now: float) -> str:
        """Why the peer is to be given up at `now`: it took or gave nothing for the patience; else empty."""
        patience = self._limits.patience
        taken, given = self.channel.wire_bytes_sent, self.channel.wire_bytes_received
        if self._taking.idle_seconds(taken, expected=self.wants_write, now=now) > patience:
            return f"it took nothing for {patience:g} s, with {len(self._queue)} frames waiting for it"
        if self._giving.idle_seconds(given, expected=self._reader.midway, now=now) > patience:
            return f"it stopped amid a frame for {patience:g} s"
        return ""

    def _counted(self, arrived: Frame[H] | Goodbye) -> Frame[H] | Goodbye:
        if isinstance(arrived, Frame):
            seconds = time.monotonic() - self._began
            count(self._traffic.received, arrived.header, arrived.payload_bytes, arrived.frame_bytes, seconds)
        return arrived
