"""What one writes with Python's sockets alone, which Evener's connections are compared with: a master and its nodes.

sendall and recv_into into memory that is there, and a select loop where one process serves several.
"""

from __future__ import annotations

import select
import socket

from evener.wire.identity import make_identity
from evener.wire.tls import master_context, node_context

LOOPBACK = "127.0.0.1"


class BareNode:
    """A node on a bare socket, or on Python's own SSL socket."""

    def __init__(self, port: int, size: int, *, tls: bool = False) -> None:
        self.sock = socket.create_connection((LOOPBACK, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            self.sock = node_context().wrap_socket(self.sock)
        self.memory = memoryview(bytearray(b"\1") * size)

    def push(self, size: int) -> None:
        """Send `size` bytes of the memory."""
        self.sock.sendall(self.memory[:size])

    def pull(self, size: int) -> None:
        """Receive `size` bytes into the memory."""
        rest = self.memory[:size]
        while rest:
            rest = rest[self.sock.recv_into(rest) :]


class BareMaster:
    """A master that serves such nodes with a select loop."""

    def __init__(self, num_nodes: int, size: int, *, tls: bool = False) -> None:
        self.door = socket.create_server((LOOPBACK, 0))
        self.port = self.door.getsockname()[1]
        self.memory = memoryview(bytearray(b"\2") * size)
        self.places = [memoryview(bytearray(b"\0") * size) for _ in range(num_nodes)]
        self.tls = tls

    def admit(self) -> None:
        """Take all nodes in."""
        self.socks = [self.door.accept()[0] for _ in self.places]
        for sock in self.socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls:
            secret = master_context(make_identity())
            self.socks = [secret.wrap_socket(sock, server_side=True) for sock in self.socks]

    def gather(self, size: int) -> None:
        """Receive `size` bytes from every node."""
        rests = {sock: place[:size] for sock, place in zip(self.socks, self.places, strict=True)}
        while rests:
            for sock in select.select(list(rests), [], [])[0]:
                rests[sock] = rests[sock][sock.recv_into(rests[sock]) :]
                if not rests[sock]:
                    del rests[sock]

    def scatter(self, size: int) -> None:
        """Send `size` bytes to every node."""
        for sock in self.socks:
            sock.sendall(self.memory[:size])

    def settle(self) -> None:
        """All that was sent has left."""
