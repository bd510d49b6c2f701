"""A man in the middle: passes bytes between a node and a master, and spoils them at a chosen place."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from evener.wire.identity import Address

Way = Literal["pass", "cut", "corrupt", "repeat", "drop", "swap", "delay", "stop"]
Direction = Literal["to master", "to node"]


@dataclass(frozen=True)
class Mischief:
    """What is done to the bytes of one direction.

    Attributes:
        way: `cut` closes both sides; `stop` passes nothing more and keeps them open; the others act once and go on.
        direction: whose bytes.
        begin: how many bytes pass untouched.
        length: of the piece that is spoiled.
    """

    way: Way
    direction: Direction = "to master"
    begin: int = 0
    length: int = 1

    @property
    def needed_bytes(self) -> int:
        """How much has to be held back before the piece can be spoiled; a delay begins with its first byte.

        To wait for more would be a deadlock where a piece reaches beyond one flight of a handshake.
        """
        return {"swap": 2 * self.length, "delay": 1}.get(self.way, self.length)

    def apply(self, data: bytes) -> bytes:
        """`data`, which holds the whole piece, with the piece spoiled."""
        piece, rest = data[: self.length], data[self.length :]
        match self.way:
            case "corrupt":
                return bytes(byte ^ 0x55 for byte in piece) + rest
            case "repeat":
                return piece + piece + rest
            case "drop":
                return rest
            case "swap":
                swapped = rest[: self.length] + piece + rest[self.length :]
                return swapped if swapped != data else bytes(byte ^ 0x55 for byte in piece) + rest
            case "delay":
                time.sleep(0.1)
        return data


class _Stream:
    """One direction of the one connection that a proxy serves."""

    def __init__(self, source: socket.socket, target: socket.socket, mischief: Mischief) -> None:
        self.source, self.target = source, target
        self._mischief, self._passed, self._held, self._done = mischief, 0, b"", mischief.way == "pass"

    def forward(self) -> bool:
        """Pass on what has come; whether the connection lives on."""
        try:
            data = self.source.recv(65536)
            if data:
                self.target.sendall(self._spoil(data))
            return bool(data) and not (self._done and self._mischief.way == "cut")
        except OSError:
            return False

    def _spoil(self, data: bytes) -> bytes:
        if self._done:
            return b"" if self._mischief.way == "stop" else data
        honest = data[: max(0, self._mischief.begin - self._passed)]
        self._passed += len(honest)
        self._held += data[len(honest) :]
        if len(self._held) < self._mischief.needed_bytes:
            return honest  # until the whole piece is there
        held, self._held, self._done = self._held, b"", True
        return honest if self._mischief.way in ("cut", "stop") else honest + self._mischief.apply(held)


@contextmanager
def man_in_the_middle(master: Address, mischief: Mischief) -> Iterator[Address]:
    """The address at which one node is let through to `master`, with its bytes spoiled on the way."""
    door = socket.create_server(("127.0.0.1", 0))
    ended, wake = socket.socketpair()

    def serve() -> None:
        with door, ended, selectors.DefaultSelector() as selector:
            selector.register(door, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            if any(key.fileobj is ended for key, _ in selector.select()):
                return
            node, _ = door.accept()
            with node, socket.create_connection((master.host, master.port)) as far:
                for source, target, direction in ((node, far, "to master"), (far, node, "to node")):
                    stream = _Stream(source, target, mischief if mischief.direction == direction else Mischief("pass"))
                    selector.register(source, selectors.EVENT_READ, stream)
                _pass_on(selector)

    def _pass_on(selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended or (key.data is not None and not key.data.forward()):
                    return

    thread = threading.Thread(target=serve, name="evener-proxy")
    thread.start()
    try:
        yield Address("127.0.0.1", door.getsockname()[1])
    finally:
        wake.close()
        thread.join(10)
