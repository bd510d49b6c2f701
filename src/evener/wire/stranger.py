"""Somebody who has connected to the hub and not proved the secret yet: handshake, short notes, nothing else."""

from __future__ import annotations

import contextlib

from evener.wire.address import Address
from evener.wire.channel import Channel, NotTls, why
from evener.wire.greeting import MAGIC, NOTE_BYTES, Kind, MasterGreeting, Reply, refuse

_MOST_BYTES = 4096
"""Read at once, so that nothing unread makes the system throw our answer away when we close."""


class Stranger:
    """One connection before it is welcome.

    Args:
        channel: non-blocking.
        greeting: the master's side of it.
        origin: the address it came from.

    Attributes:
        age: seconds for which the hub has listened to it.
    """

    def __init__(self, channel: Channel, greeting: MasterGreeting, origin: Address) -> None:
        self.channel, self.origin, self.age = channel, origin, 0.0
        self._greeting = greeting
        self._shaken = False
        self._note = b""

    @property
    def has_spoken(self) -> bool:
        """Whether anything has come that was not refused at once."""
        return self.channel.wire_bytes_received > 0

    def advance(self, *, full: bool) -> Reply | None:
        """Go on with what has come; the last reply, sent already, or None while it is open whether it is welcome.

        Args:
            full: whether nobody more may be welcomed.
        """
        try:
            self._shake()
            while True:
                reply = self._hear(full)
                if reply.note:
                    self._say(reply.note)
                if reply.welcome or reply.refusal:
                    return reply
        except BlockingIOError:
            return None
        except NotTls:
            return self._refuse_plainly()
        except OSError as error:
            return Reply(b"", refusal=f"it broke off the greeting: {why(error)}")

    def _shake(self) -> None:
        if not self._shaken:
            self.channel.handshake()
            self._shaken = True

    def _hear(self, full: bool) -> Reply:
        """The reply to what has come, which has to be one note and nothing behind it."""
        space = memoryview(bytearray(_MOST_BYTES))
        count = self.channel.receive_into(space)
        if count == 0:
            return Reply(b"", refusal="it left without proving the secret")
        self._note += space[:count]
        if len(self._note) > NOTE_BYTES or not MAGIC.startswith(self._note[: len(MAGIC)]):
            return refuse(Kind.NO_HELLO)
        if len(self._note) < NOTE_BYTES:
            return Reply(b"")
        note, self._note = self._note, b""
        return self._greeting.answer(note, full=full)

    def _say(self, note: bytes) -> None:
        """Send a note; forty bytes always fit the buffers of a connection over which nothing else was sent."""
        self.channel.send([memoryview(note)])

    def _refuse_plainly(self) -> Reply:
        reply = refuse(Kind.TLS_HERE)
        with contextlib.suppress(OSError):  # it has left already
            self.channel.sock.send(reply.note)
        return reply
