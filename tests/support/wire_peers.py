"""A master and nodes for the tests of this room: types of messages, and a hub that is driven from the test's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, Identity, Role, make_identity
from evener.wire.limits import Limits
from evener.wire.server import Server
from evener.wire.server_events import FrameReceived, PeerConnected, ServerEvent


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A message without a payload."""

    name: str


class Push(msgspec.Struct, frozen=True, tag=True):
    """A message that usually has one."""

    round: int
    shapes: tuple[tuple[int, ...], ...] = ()


Kinds: TypeAlias = Hello | Push
T = TypeVar("T")

TRANSPORTS = ("tcp", "tcp+tls", "unix", "unix+tls")
SECURE, INSECURE = make_identity(), make_identity(insecure=True)
QUICK = Limits(patience=0.4)
"""Gives up soon who does not move; joining may take its time, on a machine that does much else."""


class World:
    """A hub that listens somewhere, and nodes that join it from threads of their own."""

    def __init__(self, server: Server[Kinds], address: Address, identity: Identity, limits: Limits) -> None:
        self.server, self.address, self.identity, self.limits = server, address, identity, limits
        self.pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="evener-test")
        self.events: list[ServerEvent[Kinds]] = []
        self._stack = ExitStack()

    def join(
        self, limits: Limits | None = None, address: Address | None = None, role: Role = "admin"
    ) -> tuple[Connection[Kinds], int]:
        """A connection to the hub, and the peer that it is there."""
        token = self.identity.token if role == "admin" else self.identity.token_of(role)
        node: Connection[Kinds] = self.meanwhile(
            lambda: open_connection(address or self.address, token, Kinds, limits or self.limits)
        )
        opened = self.until(PeerConnected)
        return self._stack.enter_context(closing(node)), opened.peer

    def until(self, kind: type[T], seconds: float = 5.0, where: Callable[[Any], bool] = lambda event: True) -> T:
        """The next event of this kind; others before it are kept in `events`."""
        deadline = time.monotonic() + seconds
        while True:
            for i, event in enumerate(self.events):
                if isinstance(event, kind) and where(event):
                    del self.events[i]
                    return event
            assert time.monotonic() < deadline, f"no {kind.__name__} within {seconds} s, but {self.events}"
            self.events += self.server.poll(0.05)

    def meanwhile(self, action: Callable[[], T], seconds: float = 20.0) -> T:
        """The result of a node's blocking `action`, while the hub goes on."""
        future: Future[T] = self.pool.submit(action)
        deadline = time.monotonic() + seconds
        while not future.done():
            assert time.monotonic() < deadline, f"not done within {seconds} s; events: {self.events}"
            self.events += self.server.poll(0.005)
        return future.result()

    def message(self, peer: int) -> FrameReceived[Kinds]:
        """The next message of this peer."""
        return self.until(FrameReceived, where=lambda event: event.peer == peer)

    def sent(self, peer: int, seconds: float = 5.0) -> None:
        """Everything that was sent to this peer has left the server's memory."""
        deadline = time.monotonic() + seconds
        while self.server.is_sending(peer):
            assert time.monotonic() < deadline, f"not sent within {seconds} s"
            self.events += self.server.poll(0.01)

    def close(self) -> None:
        """End everything."""
        self._stack.close()
        self.server.close()
        self.pool.shutdown()


@contextmanager
def world(
    transport: str = "tcp", tmp_path: Path | None = None, limits: Limits | None = None, **options: Any
) -> Iterator[World]:
    """A hub on the given transport, and what joins it."""
    identity = SECURE if transport.endswith("+tls") else INSECURE
    address = Address(path=f"{tmp_path}/hub") if transport.startswith("unix") else Address("127.0.0.1")
    limits = limits or Limits(patience=10)
    server: Server[Kinds] = Server(Kinds, identity, limits, **options)
    made = World(server, server.listen(address), identity, limits)
    try:
        yield made
    finally:
        made.close()
