"""Floods of small frames: every type of message at its smallest, over 1 to 24 connections, as fast as they go.

    PYTHONPATH=src:tests python -m support.largest_messages --small 2 [--only Heartbeat] [--state rank]

A master runs as a process of its own, and floods come from two others, while an admin asks for the status all the time:

    unread   thousands of whole frames follow each other; answers are never read
    read     the same, and answers are read
    half     frames that stop in their middle, over connections that are made again and again
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec
import msgspec.inspect as mi
from msgspec.structs import replace

from evener.membership.generation import Beat
from evener.ps.client import MasterClient, find_master
from evener.ps.master.handlers import may_send
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.config import StateDir
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import encode_frame
from evener.wire.identity import Role
from support.command_cluster import Cluster, cluster
from support.largest_messages import KINDS, LIMITS, STATES, Evil, Watcher, submit

Mode: TypeAlias = Literal["unread", "read", "half"]
MODES: tuple[Mode, ...] = ("unread", "read", "half")
CONNECTIONS = (1, 24)
_AT_ONCE = 250
"""Frames that are sent with one call."""
_NUM_FLOODS = 2
_ENDS_STATE = (m.Leave, m.Notice, m.NotReady, r.RankEnded)
"""After which a node takes part no more; they are tried last."""


class Small(NamedTuple):
    """The state of a master after the frames.

    Attributes:
        what: was sent.
        num_connections: at once.
        sent: frames.
        opened: connections, as each that the master closes is made again.
        slowest: seconds that an admin waited for an answer.
        undisturbed: the same without the seconds in which master or admin waited for a processor of a busy machine.
        growth: of the master's memory at its peak, as a part of what it was before this type.
        busy: seconds that it computed in all.
    """

    what: str
    num_connections: int
    sent: int
    opened: int
    slowest: float
    undisturbed: float
    growth: float
    busy: float

    def __str__(self) -> str:
        return (
            f"{self.what:44} {self.num_connections:3} connections {self.sent:9} frames {self.opened:6} opened, "
            f"slowest {self.slowest:5.2f} s, {self.undisturbed:4.2f} s undisturbed, memory {self.growth:+5.0%}, "
            f"computed {self.busy:5.2f} s"
        )


def smallest(kind: Any) -> Any:
    """The smallest value of a type that its bounds allow, as it travels."""
    if isinstance(kind, mi.StructType):
        fields = [smallest(field.type) for field in kind.fields]
        if kind.array_like:
            return fields if kind.tag is None else [kind.tag, *fields]
        return dict(zip([field.encode_name for field in kind.fields], fields, strict=True))
    if isinstance(kind, mi.UnionType):
        has_none = any(isinstance(one, mi.NoneType) for one in kind.types)
        return None if has_none else smallest(kind.types[0])
    if isinstance(kind, mi.Metadata):
        return smallest(kind.type)
    if isinstance(kind, mi.VarTupleType):
        return [smallest(kind.item_type)] * (kind.min_length or 0)
    if isinstance(kind, mi.DictType):
        return {}
    if isinstance(kind, mi.StrType):
        return "0" * 64 if kind.pattern is not None and "0-9a-f" in kind.pattern else "x" * (kind.min_length or 1)
    if isinstance(kind, mi.IntType):
        return max(1, kind.ge or 0, (kind.gt or 0) + 1)
    if isinstance(kind, mi.FloatType):
        return 0.25
    if isinstance(kind, mi.LiteralType):
        return kind.values[0]
    return False if isinstance(kind, mi.BoolType) else None


@cache
def _smallest_of(kind: Any) -> Any:
    return msgspec.convert(smallest(mi.type_info(kind)), kind)


def small_frames(number: int, first: int, run: str, process: int) -> bytes:
    """Return frames of the type of this number in `KINDS`, which follow each other from sequence number `first` on."""
    kind = KINDS[number]
    fields: dict[str, Any] = {"run": run, "process": process, "protocol": m.PROTOCOL_VERSION}
    header = replace(
        _smallest_of(cast(Hashable, kind)), **{key: one for key, one in fields.items() if key in kind.__struct_fields__}
    )
    said = msgspec.msgpack.encode(Beat(count=1, step=1, holds=0))
    buffers: Sequence[bytes] = {r.RankSaid: [said], r.RankShown: [b"[]"]}.get(kind, [])
    views = [view for place in range(_AT_ONCE) for view in encode_frame(first + place, header, buffers, LIMITS)]
    return b"".join(bytes(view) for view in views)


class Flood:
    """The connections of one process.

    Args:
        address: of the master.
        token: for this role.
        role: of the token.
        state: of each connection; see `Evil`.
        names: of the nodes, one for each connection.
        mode: of sending.
    """

    def __init__(self, address: str, token: str, role: Role, state: str, names: Sequence[str], mode: Mode) -> None:
        self._peers = [Evil(address, token, role, state, name) for name in names]
        self._mode = mode
        self.sent = self.opened = 0
        self._rest: dict[Evil, memoryview] = {}

    def send(self, number: int, seconds: float) -> None:
        """Send frames of a type for so long."""
        for peer in self._peers:
            with suppress(CannotJoin, ConnectionLost, OSError):
                peer.come()
                self.opened += 1
        frames, until = cache(small_frames), time.monotonic() + seconds
        while time.monotonic() < until:
            moved = False
            for peer in self._peers:
                with suppress(CannotJoin, ConnectionLost, OSError):
                    moved |= self._push(peer, number, frames)
                    continue
                peer.leave()
                self._rest.pop(peer, None)
            if not moved:
                time.sleep(0.001)

    def _push(self, peer: Evil, number: int, frames: Any) -> bool:
        """Send what the kernel takes of the next frames. Raises OSError: the master has closed the connection."""
        if peer.connection is None:
            self.opened += 1
            peer.come()
        connection = peer.connection
        assert connection is not None
        sock = connection._transport.sock
        sock.setblocking(False)
        if peer not in self._rest:
            data = frames(number, connection._sequence, peer.run, peer.process)
            connection._sequence += _AT_ONCE
            self._rest[peer] = memoryview(data)[: len(data) // _AT_ONCE // 2 if self._mode == "half" else len(data)]
        if self._mode == "read":
            with suppress(BlockingIOError):
                while sock.recv(2**16):
                    pass
                raise ConnectionLost("the master closed it")
        try:
            count = sock.send(self._rest[peer])
        except BlockingIOError:
            return False
        self._rest[peer] = self._rest[peer][count:]
        if not self._rest[peer]:
            self.sent += 1 if self._mode == "half" else _AT_ONCE
            del self._rest[peer]
            if self._mode == "half":
                peer.leave()
        return True

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers:
            peer.leave()


def flood(
    address: str, token: str, role: Role, state: str, names: Sequence[str], mode: Mode, number: int, seconds: float
) -> tuple[int, int]:
    """Send frames of the type of this number from this process; return how many, and over how many connections."""
    one = Flood(address, token, role, state, names, mode)
    try:
        one.send(number, seconds)
    finally:
        one.close()
    return one.sent, one.opened


def floods(
    role: Role, state: str, seconds: float, only: str = "", connections: Sequence[int] = CONNECTIONS
) -> Iterator[Small]:
    """Yield what became of a master under a flood of each type of message, in each mode."""
    kinds = [one for one in KINDS if only in one.__name__ and (may_send(role, one) or state == "stranger")]
    kinds.sort(key=lambda one: one in _ENDS_STATE)
    with (
        cluster("--insecure") as ps,
        ProcessPoolExecutor(_NUM_FLOODS, get_context("spawn")) as pool,
        Watcher(ps) as watcher,
    ):
        for one in [pool.submit(time.sleep, 1.0) for _ in range(_NUM_FLOODS)]:
            one.result()  # by then both processes have loaded what they need
        for kind in kinds:
            before = watcher.memory
            for mode in MODES:
                for num_connections in connections:
                    _have_run(ps, state)
                    yield _flooded(ps, watcher, pool, before, role, state, kind, mode, num_connections, seconds)


def _flooded(
    ps: Cluster, watcher: Watcher, pool: ProcessPoolExecutor, before: int, role: Role, state: str, kind: Any,
    mode: Mode, num_connections: int, seconds: float,
) -> Small:  # fmt: skip
    token = (ps.home / "tokens" / role).read_text()
    names = [f"n{place}" for place in range(num_connections)]
    watcher.begin()
    busy = watcher.busy
    parts = [names[place::_NUM_FLOODS] for place in range(_NUM_FLOODS)]
    given = (ps.address, token, role, state)
    futures = [pool.submit(flood, *given, part, mode, KINDS.index(kind), seconds) for part in parts if part]
    sent, opened = (sum(values) for values in zip(*(one.result() for one in futures), strict=True))
    what = f"{kind.__name__} {mode}, {state} ({role})"
    time.sleep(0.2)  # an answer that is still awaited counts
    growth, busy = watcher.peak / before - 1, watcher.busy - busy
    return Small(what, num_connections, sent, opened, watcher.slowest, watcher.undisturbed, growth, busy)


def _have_run(ps: Cluster, state: str) -> None:
    if state in ("in a run", "a rank", "beside a run"):
        with MasterClient(*find_master(StateDir(ps.home), None, None)) as admin:
            if not admin.ask().runs:
                submit(admin, state)


def show_all(seconds: float, only: str, state: str) -> None:
    """Print what becomes of masters under floods of each type."""
    worst = list[Small]()
    for role, one in STATES:
        if state in one:
            for small in floods(role, one, seconds, only):
                sys.stdout.write(f"{small}\n")
                sys.stdout.flush()
                worst = sorted([*worst, small], key=lambda found: -found.undisturbed)[:8]
    sys.stdout.write("the slowest answers:\n" + "".join(f"    {one}\n" for one in worst))
