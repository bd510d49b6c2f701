"""Peers of a master of which every message is written by hand, and what it says and logs of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from evener.ps.protocol import messages as m
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.messages import PROTOCOL_VERSION, Header, Join, Prepare, Ready, RunRejected, ServerReply
from evener.records.profile import DeviceProfile
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import ConnectionLost
from evener.wire.limits import Limits
from support.master_in_threads import Plane


def stranger(ps: Plane) -> Connection[Header]:
    return open_connection(ps.address, ps.identity.token, ToNode, Limits(patience=5))


def introduction(name: str, protocol: int = PROTOCOL_VERSION, *, profiled: bool = False) -> Join:
    profile = DeviceProfile(node=name, device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
    return Join(
        protocol=protocol,
        name=name,
        incarnation=1,
        evener="0",
        python="3.11",
        torch="",
        clock=0.0,
        device="cpu",
        profile=profile if profiled else None,
    )


def play(connection: Connection[Header]) -> Any:
    """Be ready for whatever is to be prepared; the first lease."""
    while not isinstance(header := connection.receive().header, Prepare):
        pass
    connection.send(Ready(run=header.run, unit_seconds=1e-3))
    return next_told(connection).answer.lease


def next_told(connection: Connection[Header]) -> Any:
    while not isinstance(header := connection.receive().header, ServerReply):
        pass
    return header


def joined(connection: Connection[m.Header], **words: Any) -> None:
    connection.send(replace(introduction("evil", profiled=True), **words))


def welcomed(connection: Connection[m.Header]) -> None:
    joined(connection)
    while not isinstance(connection.receive().header, m.Welcome):
        pass


def told_until_closed(connection: Connection[m.Header], name: str = "it") -> list[m.Header]:
    """All that comes until the master closes the connection."""
    found: list[m.Header] = []
    until = time.monotonic() + 10
    while True:
        assert time.monotonic() < until, f"{name} goes on"
        try:
            found.append(connection.receive().header)
        except ConnectionLost:
            return found


def log_of(ps: Plane) -> list[dict[str, str]]:
    path = ps.home.audit
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def refusals(ps: Plane) -> list[dict[str, str]]:
    return [line for line in log_of(ps) if line["what"] == "refused"]


class Sent(list[tuple[int | None, Any]]):
    def __call__(self, peer: int | None, header: Any, buffers: Sequence[Any] = ()) -> None:
        self.append((peer, header))

    def reasons(self, peer: int) -> list[str]:
        return [header.reason for to, header in self if to == peer and isinstance(header, RunRejected)]
