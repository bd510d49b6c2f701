"""Whether a machine can be connected to: who listens says its clock and sends 64 KB, who connects reads both.

The kilobytes fill packets to the largest size: where one on the way is too large and dropped without a word, the clock
arrives and they do not. Who connects and says a byte then is sent as much as goes through, for at most half a second.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from evener.doctor.peers import Link

_CLOCK = struct.Struct("<d")
_LARGE = bytes(1 << 16)
_POLL_SECONDS = 0.05
_SEND_SECONDS = 5.0
_MORE, _STREAM_SECONDS = b"+", 0.5
_RATE_BLOCK = 1 << 18


class Listeners:
    """Sockets at which this machine may be connected to, inside a `with`.

    Args:
        addresses: of this machine; one that it has not is left out.

    Attributes:
        places: addresses and ports, as the system chose them.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._servers: list[_Server] = []
        for address in addresses:
            with suppress(OSError):  # no address of this machine, so no other machine is asked to connect there
                self._servers.append(_Server((address, 0), _Answer))
        self.places = tuple((str(one.server_address[0]), int(one.server_address[1])) for one in self._servers)
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        for server in self._servers:
            thread = threading.Thread(
                target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True, name="evener-probe"
            )
            thread.start()
            self._closing.callback(thread.join)
            self._closing.callback(server.server_close)
            self._closing.callback(server.shutdown)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.close()


def probe(address: str, port: int, until: float) -> float | str:
    """Connect to another machine's listener.

    Args:
        address: of the other machine.
        port: of its listener.
        until: as `time.monotonic` counts.

    Returns:
        Seconds by which its clock is ahead of this one's; or in words why nothing came.
    """
    clock = b""
    try:
        began = time.time()
        with socket.create_connection((address, port), timeout=max(0.1, until - time.monotonic())) as sock:
            clock = _read(sock, _CLOCK.size, until)
            ahead = float(_CLOCK.unpack(clock)[0]) - (began + time.time()) / 2
            _read(sock, len(_LARGE), until)
            return ahead
    except TimeoutError:
        return "large packets do not arrive, small ones do: an MTU on the way is smaller" if clock else "no answer"
    except OSError as error:
        return (error.strerror or type(error).__name__)[:200]


def measure_link(machine: str, address: str, port: int, until: float, seconds: float) -> Link | str:
    """Connect to another machine's listener, and measure how fast bytes come from there.

    Args:
        machine: its name.
        address: of it.
        port: of its listener.
        until: as `time.monotonic` counts.
        seconds: for which bytes are taken.

    Returns:
        The link; or in words why nothing came.
    """
    try:
        began = time.monotonic()
        with socket.create_connection((address, port), timeout=max(0.1, until - began)) as sock:
            connected = time.monotonic()
            _read(sock, _CLOCK.size + len(_LARGE), until)
            rate = _rate(sock, min(seconds, _STREAM_SECONDS))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or type(error).__name__)[:200]
    return Link(machine=machine, seconds=connected - began, bytes_per_second=rate)


def _rate(sock: socket.socket, seconds: float) -> float:
    """Bytes a second that come within so many seconds; 0 if none do."""
    sock.settimeout(seconds)
    sock.sendall(_MORE)
    received, began, memory = 0, time.monotonic(), bytearray(_RATE_BLOCK)
    while (took := time.monotonic() - began) < seconds:
        with suppress(TimeoutError):
            if not (came := sock.recv_into(memory)):
                break
            received += came
    return received / took


def _read(sock: socket.socket, nbytes: int, until: float) -> bytes:
    """Exactly so many bytes."""
    parts, missing = [], nbytes
    while missing:
        sock.settimeout(max(0.01, until - time.monotonic()))
        part = sock.recv(missing)
        if not part:
            raise ConnectionResetError("closed by the other machine")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that breaks off: it reports that itself."""


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Say the clock, then send what fills packets."""
        self.request.settimeout(_SEND_SECONDS)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request.sendall(_CLOCK.pack(time.time()))
        self.request.sendall(_LARGE)
        if self.request.recv(len(_MORE)) == _MORE:
            until = time.monotonic() + _STREAM_SECONDS
            while time.monotonic() < until:
                self.request.sendall(_LARGE)
