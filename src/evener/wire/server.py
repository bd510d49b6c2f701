"""The server: a master's side of all connections, in one thread that never blocks and returns events.

    server = Server(Push | Pull, identity, place=place)
    address = server.listen(Address.parse(":7000"))
    while running:
        for event in server.poll(timeout=1.0):
            match event:
                case PeerConnected(peer, origin): ...
                case FrameReceived(peer, header, buffers): server.send(peer, Weights(round=7), [weights])
                case PeerFailed(peer, error): ...
                case PeerDisconnected(peer, reason): ...

A slow, stopped or hostile peer does not slow down the others. No call blocks, and a peer's turn is limited to about a
megabyte and `MAX_TURN_FRAMES` frames. A poll serves admins first, and ends after `TURN_SECONDS`, or when its frames
cost `MAX_POLL_BYTES`. The connection of a peer without progress for the patience is closed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias

import msgspec

from evener.records.errors import is_of_the_disk
from evener.system.memory import usable_memory
from evener.wire.acceptor import Acceptor
from evener.wire.connection import Peer
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer, Close, Frame, H
from evener.wire.identity import Address, Grant, Identity, Token
from evener.wire.limits import Limits
from evener.wire.reader import FrameReader
from evener.wire.relay_lines import RelayLines
from evener.wire.server_events import (
    FrameReceived,
    PeerConnected,
    PeerDisconnected,
    PeerFailed,
    PeerRefused,
    ServerEvent,
)
from evener.wire.sockets import READABLE, WRITABLE
from evener.wire.transport import CHUNK, TURN_SECONDS, Poller, Transport, explain

PeerPlace: TypeAlias = Callable[[int, H, tuple[int, ...]], Sequence[Buffer] | None]
"""Returns the memory for a peer's frame, given peer, header and lengths; None drops the buffers, BadFrame refuses them.

The same memory must not be returned again before its `FrameReceived` event: the next frame may follow immediately.
"""
PeerOnPart: TypeAlias = Callable[[int, H, int, bool], bool]
"""Called with peer, header, received bytes of the payload, and whether these are all; see `reader.OnPart`.

A frame that it has handled causes no event: the poll continues, and its memory may be reused immediately.
"""

FAILED = "its data could not be handled"
"""Reason for closing a connection after an error of the master, whose details the peer does not get."""
DISK_FULL = "the master's disk is full, or cannot be written to"
"""Reason for closing a connection after an error of the master's disk."""
MAX_TURN_FRAMES = 32
"""Frames of one peer that are returned before other peers' turns."""
MAX_POLL_BYTES = 2 * CHUNK
"""Cost of the frames that a poll returns before the next turn of admins; one more frame may come."""
_FRAME_COST_BYTES = 16 * 1024
"""Cost of a frame in addition to its payload, because handling an empty frame takes time, too."""
_KEPT_BUFFERS = 2
"""Number of large buffers that may wait for all peers together whatever memory is left."""
_TICKS = 20
"""Number of checks within the shortest deadline."""


class Server(Generic[H]):
    """All connections of a master; its calls belong to one thread.

    Args:
        headers: Type of the headers that nodes send.
        identity: Identity of this master, which decides whether TLS is used.
        limits: Limits of nodes and pending peers.

    Attributes:
        place: Returns the memory of payload; None allocates it. It may call `send` and `disconnect`. Set it before the
            first connection.
        on_part: Called with progress. Set it before the first connection.
    """

    def __init__(
        self,
        headers: Any,
        identity: Identity,
        limits: Limits | None = None,
        *,
        place: PeerPlace[H] | None = None,
        on_part: PeerOnPart[H] | None = None,
    ) -> None:
        self._headers, self._limits = headers, limits or Limits()
        self.place, self.on_part = place, on_part
        self._poller = Poller()
        self._peers: dict[int, Peer[H]] = {}
        self._events: list[ServerEvent[H]] = []
        self._again: dict[int, Peer[H]] = {}
        self._unparsed: set[int] = set()
        self._polled_bytes = 0
        self._num_connected = 0
        self._tick_seconds = min(self._limits.handshake_seconds, self._limits.patience) / _TICKS
        self._ticked = time.monotonic()
        self._has_drained = self._is_closed = False
        self._acceptor = Acceptor(
            identity, self._limits, self._poller, self._is_full, self._on_connected, self._on_refused
        )

    @property
    def tokens(self) -> dict[Grant, Token]:
        """Accepted tokens other than the admin's, by what they allow; may change at any time."""
        return self._acceptor.others

    @property
    def peers(self) -> list[int]:
        """All connected peers."""
        return list(self._peers)

    def listen(self, address: Address) -> Address:
        """Also accept connections at `address`; return the address with its real port.

        Raises:
            CannotListen: The address is taken, not of this machine, or not allowed.
        """
        return self._acceptor.listen(address)

    def listen_by(self, lines: RelayLines) -> None:
        """Also accept connections that come through a relay; closing the server closes its lines."""
        self._acceptor.listen_by(lines)

    def poll(self, timeout: float) -> list[ServerEvent[H]]:
        """Return the events; wait up to `timeout` seconds for an event, or until the queue of a peer is sent."""
        now, self._polled_bytes = time.monotonic(), 0
        until = now if self._events else now + timeout
        while True:
            due = self._ticked + self._tick_seconds
            again, self._again = self._again, {}
            self._poller.run(0.0 if again else max(0.0, min(until, due) - now), self._has_enough)
            until_next = time.monotonic() + TURN_SECONDS
            for number, end in again.items():
                if number in self._again:  # it was ready, and has been served already
                    continue
                if self._has_enough() or time.monotonic() > until_next:
                    self._again[number] = end
                else:
                    self._serve(end, READABLE)
            now = time.monotonic()
            if now >= due:
                self._tick(now)
            if self._events or self._has_drained or now >= until:
                break
        events, self._events, self._has_drained = self._events, [], False
        return events

    def send(self, peer: int | None, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame without waiting; `buffers` may change again when `is_sending` is false.

        A peer that has disconnected, or None, is ignored: its `PeerDisconnected` event has come or will come.

        Raises:
            InvalidValue: The frame exceeds a limit.
        """
        if peer is None or (end := self._peers.get(peer)) is None:
            return
        try:
            waits = end.send(header, buffers)
        except BadFrame as error:
            self.fail(peer, error)
            return
        if waits != end.is_watched:
            self._watch_writing(end)

    def is_sending(self, peer: int) -> bool:
        """Return whether the kernel has not yet taken all that was sent to a peer."""
        end = self._peers.get(peer)
        return end is not None and end.wants_write

    def is_delivering(self, peer: int) -> bool:
        """Return whether bytes for a peer are still being delivered, also if the kernel has all of them."""
        end = self._peers.get(peer)
        return end is not None and end.is_delivering()

    def num_waiting(self, peer: int | None = None) -> int:
        """Return the number of frames queued for a peer, or for all peers if it is None."""
        ends = self._peers.values() if peer is None else [end for end in (self._peers.get(peer),) if end is not None]
        return sum(end.num_waiting for end in ends)

    def disconnect(self, peer: int, reason: str) -> None:
        """Close a connection now. The peer gets `reason` unless frames wait for it. `PeerDisconnected` follows."""
        if (end := self._peers.get(peer)) is not None:
            end.send_close(reason)
            self._end(end, reason)

    def fail(self, peer: int, error: Exception) -> None:
        """Close a connection whose data could not be handled. `PeerFailed` follows."""
        if peer in self._peers:
            self._events.append(PeerFailed(peer, error))
            ours = DISK_FULL if is_of_the_disk(error) else FAILED
            self.disconnect(peer, str(error) if isinstance(error, BadFrame) else ours)

    def close(self, reason: str = "the master closes") -> None:
        """Disconnect all peers and close everything."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in self.peers:
            self.disconnect(peer, reason)
        self._acceptor.close()
        self._poller.close()

    def _tick(self, now: float) -> None:
        # Pending peers do not age while the master is busy elsewhere.
        self._acceptor.tick(min(now - self._ticked, 2 * self._tick_seconds))
        self._ticked = now
        for end in list(self._peers.values()):
            if reason := end.stalled(now):
                self.disconnect(end.number, reason)
        self._relieve()

    def _relieve(self) -> None:
        """Disconnect the peers with the longest queues while too much waits for all peers together."""
        self._relieve_memory()
        waiting = sorted(((end.excess_bytes, number) for number, end in self._peers.items()), reverse=True)
        total = sum(count for count, _ in waiting)
        for count, number in waiting:
            if total <= self._limits.queued_bytes_in_all:
                return
            self.fail(number, BadFrame(f"it receives too slowly: {count} bytes wait for it, and {total} for all"))
            total -= count

    def _relieve_memory(self) -> None:
        """Disconnect peers for which large buffers wait, while there is no memory for two more of these.

        Two buffers may always wait, such as the present weights and those before: all nodes need one of them.
        """
        held = {number: buffers for number, end in self._peers.items() if (buffers := end.large_buffers)}
        left: int | None = None
        while True:
            holders = Counter(key for buffers in held.values() for key in buffers)
            sizes = {key: size for buffers in held.values() for key, size in buffers.items()}
            if len(sizes) <= _KEPT_BUFFERS:
                return
            left = usable_memory()[1] if left is None else left
            own = {
                number: sum(size for key, size in buffers.items() if holders[key] == 1)
                for number, buffers in held.items()
            }
            number = max(own, key=lambda number: own[number])
            if left >= 2 * max(sizes.values()) or not own[number]:
                return
            left += own[number]
            del held[number]
            what = f"{sum(sizes.values())} bytes of large buffers wait for all peers"
            self.fail(number, BadFrame(f"it receives too slowly: {what}"))

    def _serve(self, end: Peer[H], ready: int) -> None:
        """Receive from and send to a socket that is ready."""
        if end.number not in self._peers:  # closed in the meantime
            return
        if ready != WRITABLE:  # reading also detects errors
            try:
                self._receive(end)
            except Exception as error:  # any error concerns only this connection
                self._on_error(end, error)
        if ready != READABLE and end.is_watched and end.number in self._peers and not end.transmit():
            self._watch_writing(end)
            self._has_drained = True

    def _on_error(self, end: Peer[H], error: Exception) -> None:
        """Handle an error of receiving: no more bytes, a broken connection, or a frame that could not be handled."""
        if end.reader.refused is not None or not isinstance(error, OSError):
            self.fail(end.number, error)
        elif not isinstance(error, BlockingIOError):
            self._end(end, explain(error))

    def _receive(self, end: Peer[H]) -> None:
        """Read frames, at most about a megabyte and `MAX_TURN_FRAMES`, so that no peer blocks the others.

        Raises:
            BadFrame: The bytes are not the expected frame, or the frame was refused.
            OSError: The connection broke or ended, or (BlockingIOError) no more bytes have come.
        """
        number, reader, transport, received, max_frames = end.number, end.reader, end.transport, 0, MAX_TURN_FRAMES
        if number in self._unparsed:
            self._unparsed.discard(number)
            if not (max_frames := self._hand_out(end, reader.feed(0), max_frames)):
                return
        while received < CHUNK:
            space = reader.space
            if not (count := transport.receive_into(space)):
                raise ConnectionResetError("cut off within a frame" if reader.midway else "it closed without a reason")
            arrived = reader.feed(count)
            if number not in self._peers:  # `place` or `on_part` has disconnected it
                return
            if arrived is not None and not (max_frames := self._hand_out(end, arrived, max_frames)):
                return
            if not transport.has_unread and (count < len(space) or not reader.midway):
                return
            received += count
        if transport.has_unread:  # the socket may not become readable for these
            self._again[number] = end

    def _hand_out(self, end: Peer[H], arrived: Frame[H] | Close | None, max_frames: int) -> int:
        """Make events of at most `max_frames` frames; return how many may follow, where 0 ends the turn.

        Raises:
            BadFrame: The next frame is not the expected one, or was refused.
        """
        number, reader = end.number, end.reader
        while arrived is not None:
            if number not in self._peers:  # `place` or `on_part` has disconnected it
                return 0
            if not isinstance(arrived, Frame):
                self._end(end, arrived.clause)
                return 0
            if not reader.is_taken:
                self._events.append(FrameReceived(number, arrived.header, arrived.buffers))
            self._polled_bytes += _FRAME_COST_BYTES + sum(view.nbytes for view in arrived.buffers)
            max_frames -= 1
            if not max_frames:
                if reader.midway:
                    self._unparsed.add(number)
                if reader.midway or end.transport.has_unread:
                    self._again[number] = end
                return 0
            arrived = reader.feed(0) if reader.midway else None
        return max_frames if number in self._peers else 0

    def _has_enough(self) -> bool:
        return self._polled_bytes >= MAX_POLL_BYTES

    def _watch_writing(self, end: Peer[H]) -> None:
        end.is_watched = not end.is_watched
        self._poller.watch_writing(end.transport.sock, end.is_watched)

    def _is_full(self, grant: Grant) -> bool:
        return len(self._peers) >= self._limits.connections_of(grant.role)

    def _on_connected(self, transport: Transport, origin: str, grant: Grant) -> None:
        number, self._num_connected = self._num_connected, self._num_connected + 1
        reader: FrameReader[H] = FrameReader(self._headers, self._limits)
        if self.place is not None:
            reader.place = partial(self.place, number)
        if self.on_part is not None:
            reader.on_part = partial(self.on_part, number)
        end = self._peers[number] = Peer(number, transport, reader, self._limits, time.monotonic())
        self._poller.watch(transport.sock, partial(self._serve, end), is_urgent=grant.role == "admin")
        self._events.append(PeerConnected(number, origin, grant))

    def _on_refused(self, origin: str, reason: str) -> None:
        self._events.append(PeerRefused(origin, reason))

    def _end(self, end: Peer[H], reason: str) -> None:
        if self._peers.pop(end.number, None) is not None:
            self._unparsed.discard(end.number)
            self._poller.forget(end.transport.sock)
            end.transport.sock.close()
            self._events.append(PeerDisconnected(end.number, reason))
