"""A node's side of a connection: blocking, every wait within the patience, payload straight from and into its memory.

    connection = connect(address, token, Push | Pull)          # dialling.py
    connection.send(Push(round=7), [gradients])                # returns when the kernel has all of it
    frame = connection.receive(place=lambda header, lengths: [weights])

One thread may send while another one receives. The master's side never waits (hub.py), so a blocking send always ends;
two blocking sides that send large frames to each other at once would both wait.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic

import msgspec

from evener.wire.channel import Channel, why
from evener.wire.frame import Buffer, Frame, Goodbye, H, allocate
from evener.wire.limits import Limits
from evener.wire.outgoing import Outgoing, goodbye, message
from evener.wire.reader import FrameReader, OnPart, Place
from evener.wire.refusals import BadFrame, ConnectionLost
from evener.wire.traffic import Traffic, count

_GOODBYE_SECONDS = 1.0


class Connection(Generic[H]):
    """A connection whose two sides have proved the secret to each other.

    Args:
        channel: over which frames go; its socket's time limit becomes the patience.
        headers: type of the headers that may be received.
        limits: of frames, and the patience.
        place: of the peer, in words, for errors.
    """

    def __init__(self, channel: Channel, headers: Any, limits: Limits, place: str) -> None:
        self._channel, self._limits, self._place = channel, limits, place
        self._reader: FrameReader[H] = FrameReader(headers, limits)
        self._sequence = 0
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._traffic = Traffic()
        self._broken = ""
        channel.sock.settimeout(limits.patience)

    @property
    def traffic(self) -> Traffic:
        """What went through so far."""
        self._traffic.wire_bytes_sent = self._channel.wire_bytes_sent
        self._traffic.wire_bytes_received = self._channel.wire_bytes_received
        return self._traffic

    def send(self, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame; its memory is not referred to afterwards.

        Raises:
            ConnectionLost: the connection broke, or nothing moved for the patience; it cannot be used any more.
            InvalidValue: the frame exceeds a limit.
        """
        with self._sending:
            self._require_open()
            frame = message(self._sequence, header, buffers, self._limits)
            self._sequence += 1
            started = time.perf_counter()
            try:
                self._push(frame)
            except OSError as error:
                raise self._lost(error, f" while {type(header).__name__} was sent", ask_why=True) from error
            seconds = time.perf_counter() - started
            count(self._traffic.sent, header, frame.payload_bytes, frame.frame_bytes, seconds)

    def receive(self, place: Place[H] = allocate, on_part: OnPart[H] | None = None) -> Frame[H]:
        """The next frame; waits for its first byte, and for every further one, as long as the patience.

        Args:
            place: where its buffers go, given header and lengths; None drops them.
            on_part: told header and bytes received so far, whenever some have come.

        Raises:
            ConnectionLost: the peer said goodbye, the connection broke, or nothing came for the patience.
            BadFrame: what came is not the frame that was due, or `place` refused it.
        """
        with self._receiving:
            self._require_open()
            self._reader.place, self._reader.on_part = place, on_part
            try:
                arrived, seconds = self._pull()
            except OSError as error:
                raise self._lost(error, " while a frame was awaited") from error
            except BadFrame as error:
                self.close(str(error))
                raise
        if isinstance(arrived, Goodbye):
            raise self._lost(ConnectionAbortedError(_words(arrived)))
        count(self._traffic.received, arrived.header, arrived.payload_bytes, arrived.frame_bytes, seconds)
        return arrived

    def wait(self, seconds: float) -> bool:
        """Whether something has come, or the end, within `seconds`; `receive` then begins at once."""
        self._require_open()
        if self._reader.midway or self._channel.has_unread:
            return True
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def close(self, reason: str = "") -> None:
        """Close the connection, also under a thread that waits in it; the peer is told `reason` if it listens."""
        if self._broken:
            return
        self._broken = "it was closed here" + f": {reason}" * bool(reason)
        if self._sending.acquire(blocking=False):  # else a frame is half sent, and nothing can be said any more
            with contextlib.suppress(OSError):  # the peer is gone already, which is what closing wants
                self._channel.sock.settimeout(min(_GOODBYE_SECONDS, self._limits.patience))
                self._push(goodbye(self._sequence, reason))
            self._sending.release()
        self._shut()

    def __enter__(self) -> Connection[H]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, frame: Outgoing) -> None:
        while frame.views:
            frame.advance(self._channel.send(frame.views))
        self._channel.flush()

    def _pull(self) -> tuple[Frame[H] | Goodbye, float]:
        """What comes next, and the seconds from its first byte on."""
        reader, channel, started = self._reader, self._channel, 0.0
        while (arrived := reader.frame()) is None:
            received = channel.receive_into(reader.space())
            if received == 0:
                raise ConnectionResetError("cut amid a frame" if reader.midway else "closed without a word")
            started = started or time.perf_counter()
            reader.filled(received)
        return arrived, time.perf_counter() - started if started else 0.0

    def _require_open(self) -> None:
        if self._broken:
            raise ConnectionLost(f"the connection to {self._place} cannot be used: {self._broken}")

    def _lost(self, error: OSError, when: str = "", *, ask_why: bool = False) -> ConnectionLost:
        """Close without a goodbye; the error that says why."""
        if self._broken:
            return ConnectionLost(f"the connection to {self._place} cannot be used: {self._broken}")
        cause = f"nothing moved for {self._limits.patience:g} s" if isinstance(error, TimeoutError) else why(error)
        self._broken = (self._last_word() if ask_why else "") or cause
        self._shut()
        return ConnectionLost(f"lost the connection to {self._place}{when}: {self._broken}")

    def _last_word(self) -> str:
        """Why the peer has closed, if it has said so before it stopped listening."""
        if not self._receiving.acquire(blocking=False):
            return ""
        try:
            self._channel.sock.settimeout(0)
            self._reader.place, self._reader.on_part = lambda *_: None, None
            while not isinstance(arrived := self._pull()[0], Goodbye):
                pass
            return _words(arrived)
        except (OSError, BadFrame):
            return ""
        finally:
            self._receiving.release()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self._channel.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        self._channel.sock.close()


def _words(goodbye: Goodbye) -> str:
    return f"it said: {goodbye.reason}" if goodbye.reason else "it said goodbye"
