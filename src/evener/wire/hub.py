"""A master's side of all its connections: one thread, no waiting on anybody, events out.

    hub = Hub(Push | Pull, identity, place=place)
    address = hub.listen(Address.parse(":7000"))
    while running:
        for event in hub.poll(timeout=1.0):
            match event:
                case Opened(peer, origin): ...
                case Message(peer, header, buffers): hub.send(peer, Weights(round=7), [weights])
                case Sent(peer, header): ...               # `weights` may be written to again
                case Closed(peer, reason): ...

A peer that is slow, stopped or hostile costs the others nothing: nothing here blocks, each gets its turn for about a
megabyte, and who does not move for the patience is closed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias

import msgspec

from evener.wire.address import Address
from evener.wire.channel import Channel, why
from evener.wire.doorkeeper import Doorkeeper
from evener.wire.events import Closed, Event, Message, Opened, Refused, Sent
from evener.wire.frame import Buffer, Goodbye, H
from evener.wire.identity import Identity
from evener.wire.limits import Limits
from evener.wire.link import Link
from evener.wire.reader import FrameReader
from evener.wire.refusals import BadFrame
from evener.wire.traffic import Traffic

HubPlace: TypeAlias = Callable[[int, H, tuple[int, ...]], Sequence[Buffer] | None]
"""Where the buffers of a peer's frame go, given peer, header and lengths; None drops them; BadFrame refuses them.

Memory that was given must not be given again before its `Message` has been seen: the next frame may be close behind.
"""
HubOnPart: TypeAlias = Callable[[int, H, int], None]
"""Told peer, header and how many bytes of the payload have arrived so far."""

_TICKS = 20
"""How often deadlines are looked at within the shortest of them."""


class Hub(Generic[H]):
    """All connections of a master; its calls belong to one thread, `wake` excepted.

    Args:
        headers: type of the headers that nodes send.
        identity: of this master; says whether TLS is spoken.
        limits: what nodes and strangers may ask for.
        place: where payload goes; new memory if not given. It may call `send` and `disconnect`.
        on_part: told about progress; may do the same.
    """

    def __init__(
        self,
        headers: Any,
        identity: Identity,
        limits: Limits | None = None,
        *,
        place: HubPlace[H] | None = None,
        on_part: HubOnPart[H] | None = None,
    ) -> None:
        self._headers, self._limits = headers, limits or Limits()
        self._place, self._on_part = place, on_part
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link[H]] = {}
        self._events: list[Event[H]] = []
        self._again: dict[int, Link[H]] = {}
        self._num_opened = 0
        self._past = Traffic()
        self._tick_seconds = min(self._limits.greeting_seconds, self._limits.patience) / _TICKS
        self._ticked = time.monotonic()
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._alarm, selectors.EVENT_READ, self._woken)
        self._awake = False
        self._doorkeeper = Doorkeeper(
            identity, self._limits, self._selector, self._is_full, self._welcome, self._turned_away
        )

    @property
    def peers(self) -> list[int]:
        """Everybody who is connected."""
        return list(self._links)

    def listen(self, address: Address) -> Address:
        """Take connections at `address`, besides those given before; the address with its real port.

        Raises:
            CannotListen: the address is taken, not of this machine, or not allowed.
        """
        return self._doorkeeper.open(address)

    def poll(self, timeout: float) -> list[Event[H]]:
        """What has happened; waits up to `timeout` seconds for the first event, or until `wake` is called."""
        until = time.monotonic() + timeout
        wait = 0.0 if self._events else timeout
        while True:
            self._turn(wait)
            wait = until - time.monotonic()
            if self._events or self._awake or wait <= 0:
                break
        events, self._events, self._awake = self._events, [], False
        return events

    def send(self, peer: int, header: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame without waiting; `buffers` may be written to again after `Sent`, or `Closed`.

        A peer that has gone is passed over: its `Closed` has come or is on its way.

        Raises:
            InvalidValue: the frame exceeds a limit.
        """
        if (link := self._links.get(peer)) is None:
            return
        waited = link.wants_write
        try:
            link.enqueue(header, buffers)
        except BadFrame as error:
            self.disconnect(peer, str(error))
            return
        if not waited:
            self._transmit(link)

    def is_sending(self, peer: int) -> bool:
        """Whether the kernel has not taken all yet that was sent to a peer."""
        link = self._links.get(peer)
        return link is not None and link.wants_write

    def disconnect(self, peer: int, reason: str) -> None:
        """Close a connection now; the peer is told `reason` unless frames wait for it. `Closed` follows."""
        if (link := self._links.get(peer)) is not None:
            link.say_goodbye(reason)
            self._end(link, reason)

    def traffic(self, peer: int) -> Traffic:
        """What went through a connection that is open."""
        return self._links[peer].traffic

    def total_traffic(self) -> Traffic:
        """What went through all connections, past ones too."""
        total = Traffic()
        for part in (self._past, *(link.traffic for link in self._links.values())):
            total.add(part)
        return total

    def wake(self) -> None:
        """Make `poll` return; the one call that any thread may make."""
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._bell.send(b"\0")

    def close(self, reason: str = "the master closes") -> None:
        """Say goodbye to everybody and close everything."""
        if self._bell.fileno() < 0:
            return
        for peer in self.peers:
            self.disconnect(peer, reason)
        self._doorkeeper.close()
        self._selector.close()
        self._alarm.close()
        self._bell.close()

    def __enter__(self) -> Hub[H]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self, wait: float) -> None:
        """Serve every socket that is ready, then look at the deadlines if it is time."""
        again, self._again = self._again, {}
        left = self._ticked + self._tick_seconds - time.monotonic()
        for key, mask in self._selector.select(0.0 if again else max(0.0, min(wait, left))):
            key.data(mask)
        for peer, link in again.items():
            if peer in self._links and peer not in self._again:  # else the loop above has served it
                self._receive(link)
        now = time.monotonic()
        if now - self._ticked >= self._tick_seconds:
            self._tick(now)

    def _tick(self, now: float) -> None:
        # A master that was busy elsewhere has not listened: strangers are not charged for that.
        self._doorkeeper.tick(min(now - self._ticked, 2 * self._tick_seconds))
        self._ticked = now
        for link in list(self._links.values()):
            if reason := link.stalled(now):
                self.disconnect(link.peer, reason)

    def _serve(self, link: Link[H], mask: int) -> None:
        if mask & selectors.EVENT_READ and link.peer in self._links:  # else closed since the selector spoke
            self._receive(link)
        if mask & selectors.EVENT_WRITE and link.peer in self._links:
            self._transmit(link)

    def _receive(self, link: Link[H]) -> None:
        try:
            for arrived in link.receive():
                if link.peer not in self._links:  # `place` has disconnected it
                    return
                if isinstance(arrived, Goodbye):
                    self._end(link, f"it said: {arrived.reason}" if arrived.reason else "it said goodbye")
                else:
                    self._events.append(Message(link.peer, arrived.header, arrived.buffers))
        except BadFrame as error:
            self.disconnect(link.peer, str(error))
        except OSError as error:
            self._end(link, why(error))
        if link.has_more and link.peer in self._links:
            self._again[link.peer] = link

    def _transmit(self, link: Link[H]) -> None:
        for header in link.transmit():
            self._events.append(Sent(link.peer, header))
        if link.wants_write != link.is_watched:
            link.is_watched = link.wants_write
            wanted = selectors.EVENT_READ | selectors.EVENT_WRITE * link.is_watched
            self._selector.modify(link.channel.sock, wanted, partial(self._serve, link))

    def _is_full(self) -> bool:
        return len(self._links) >= self._limits.connections

    def _welcome(self, channel: Channel, origin: str) -> None:
        peer, self._num_opened = self._num_opened, self._num_opened + 1
        reader: FrameReader[H] = FrameReader(self._headers, self._limits)
        if self._place is not None:
            reader.place = partial(self._place, peer)
        if self._on_part is not None:
            reader.on_part = partial(self._on_part, peer)
        link = self._links[peer] = Link(peer, channel, reader, self._limits, time.monotonic())
        self._selector.register(channel.sock, selectors.EVENT_READ, partial(self._serve, link))
        self._events.append(Opened(peer, origin))

    def _turned_away(self, origin: str, reason: str) -> None:
        self._events.append(Refused(origin, reason))

    def _end(self, link: Link[H], reason: str) -> None:
        if self._links.pop(link.peer, None) is not None:
            self._selector.unregister(link.channel.sock)
            link.channel.sock.close()
            self._past.add(link.traffic)
            self._events.append(Closed(link.peer, reason))

    def _woken(self, _: int) -> None:
        self._alarm.recv(4096)
        self._awake = True
