"""A master and nodes for the tests of this room: types of messages, and a hub that is driven from the test's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from evener.wire.address import Address
from evener.wire.connection import Connection
from evener.wire.dialling import connect
from evener.wire.events import Event, Message, Opened
from evener.wire.hub import Hub
from evener.wire.identity import Identity, make_identity
from evener.wire.limits import Limits


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

    def __init__(self, hub: Hub[Kinds], address: Address, identity: Identity, limits: Limits) -> None:
        self.hub, self.address, self.identity, self.limits = hub, address, identity, limits
        self.pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="evener-test")
        self.events: list[Event[Kinds]] = []
        self._stack = ExitStack()

    def join(self, limits: Limits | None = None, address: Address | None = None) -> tuple[Connection[Kinds], int]:
        """A connection to the hub, and the peer that it is there."""
        node: Connection[Kinds] = self.meanwhile(
            lambda: connect(address or self.address, self.identity.token, Kinds, limits or self.limits)
        )
        opened = self.until(Opened)
        return self._stack.enter_context(node), opened.peer

    def until(self, kind: type[T], seconds: float = 5.0, where: Callable[[Any], bool] = lambda event: True) -> T:
        """The next event of this kind; others before it are kept in `events`."""
        deadline = time.monotonic() + seconds
        while True:
            for i, event in enumerate(self.events):
                if isinstance(event, kind) and where(event):
                    del self.events[i]
                    return event
            assert time.monotonic() < deadline, f"no {kind.__name__} within {seconds} s, but {self.events}"
            self.events += self.hub.poll(0.05)

    def meanwhile(self, action: Callable[[], T], seconds: float = 20.0) -> T:
        """The result of a node's blocking `action`, while the hub goes on."""
        future: Future[T] = self.pool.submit(action)
        deadline = time.monotonic() + seconds
        future.add_done_callback(lambda _: self.hub.wake())
        while not future.done():
            assert time.monotonic() < deadline, f"not done within {seconds} s; events: {self.events}"
            self.events += self.hub.poll(0.05)
        return future.result()

    def message(self, peer: int) -> Message[Kinds]:
        """The next message of this peer."""
        return self.until(Message, where=lambda event: event.peer == peer)

    def close(self) -> None:
        """End everything."""
        self._stack.close()
        self.hub.close()
        self.pool.shutdown()


@contextmanager
def world(
    transport: str = "tcp", tmp_path: Path | None = None, limits: Limits | None = None, **hub: Any
) -> Iterator[World]:
    """A hub on the given transport, and what joins it."""
    identity = SECURE if transport.endswith("+tls") else INSECURE
    address = Address(path=f"{tmp_path}/hub") if transport.startswith("unix") else Address("127.0.0.1")
    limits = limits or Limits(patience=10)
    the_hub: Hub[Kinds] = Hub(Kinds, identity, limits, **hub)
    made = World(the_hub, the_hub.listen(address), identity, limits)
    try:
        yield made
    finally:
        made.close()
