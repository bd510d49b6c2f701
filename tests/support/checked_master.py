"""A master without sockets. Messages to it and from it are decoded as from the wire, and so are its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from evener.membership.shared_values import decode_to_rank
from evener.ps.master import handlers as handlers_module
from evener.ps.master import master as master_module
from evener.ps.master.access.members import Members
from evener.ps.master.master import Master
from evener.ps.protocol import examination_messages as e
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.directions import ToCommand, ToMaster, ToNode
from evener.ps.protocol.job import decode_job
from evener.ps.protocol.status import ClusterStatus, decode_status
from evener.records.errors import EvenerError
from evener.records.event_tail import EVENTS_FILE, EventTail, Moment
from evener.records.events import RunEvent, decode_events, encode_events
from evener.records.profile import ClusterProfile
from evener.records.record import Event, TrainRecord
from evener.records.schema import parse_noun, read_noun
from evener.report.live.live_run import LiveRun
from evener.report.live.picture import Picture
from evener.training.console import progress_words
from evener.wire.errors import BadFrame
from evener.wire.identity import Grant, make_identity
from support.extreme_values import Change
from support.machine_facts import SOUND
from support.master_in_threads import VERSIONS
from support.strangers import introduction

ADMIN = 100
IDENTITY = make_identity(insecure=True)
_headers = msgspec.msgpack.Decoder(ToNode | ToCommand)
_to_master = msgspec.msgpack.Decoder(ToMaster)
BUFFERS: dict[type[m.Header], Sequence[Callable[[Any], Any]]] = {
    m.StatusReply: (decode_status,),
    m.Prepare: (decode_job,),
    m.RunEvents: (decode_events,),
    m.RunFinished: (lambda data: parse_noun(bytes(data), TrainRecord),),
    r.PrepareRank: (r.decode_rank_job,),
    r.StartRank: (r.decode_rank_place,),
    r.RankTold: (decode_to_rank,),
    e.Examine: (lambda data: e.decode_part(data, e.TaskQuestion),),
    e.ProbeNodes: (lambda data: e.decode_part(data, tuple[e.Place, ...]),),
    e.NodesExamined: (lambda data: e.decode_part(data, e.Examination),),
}
"""How the receiver decodes the first buffer of a message."""


class CheckedServer:
    """Stands for the connections of a master; collects its messages that do not decode."""

    def __init__(self, *_: Any) -> None:
        self.tokens: dict[Grant, Any] = {}
        self.peers: list[int] = []
        self.place: Any = None
        self.on_part: Any = None
        self.sent: list[tuple[int | None, m.Header, list[bytes]]] = []
        self.faults: list[str] = []

    def send(self, peer: int | None, header: m.Header, buffers: Sequence[Any] = ()) -> None:
        try:
            header = _headers.decode(msgspec.msgpack.encode(header))
            parts = [bytes(memoryview(one).cast("B")) for one in buffers]
            for part, decode in zip(parts, BUFFERS.get(type(header), ()), strict=False):
                if part:
                    decode(part)
        except (msgspec.DecodeError, EvenerError, OverflowError) as error:
            self.faults.append(f"{type(header).__name__}: {error}")
            return
        self.sent.append((peer, header, parts))

    def disconnect(self, peer: int, reason: str) -> None:
        pass

    def fail(self, peer: int, error: Exception) -> None:
        self.faults.append(f"peer {peer}: {error}")

    def num_waiting(self, _: int | None = None) -> int:
        return 0

    def is_sending(self, _: int) -> bool:
        return False

    def is_delivering(self, _: int) -> bool:
        return False

    def poll(self, _: float) -> list[Any]:
        return []

    def close(self, _: str) -> None:
        pass


class CheckedMaster:
    """A master, and nodes that answer it at once with the usual messages, each changed as the test says.

    Args:
        folder: of the master's state.
        change: of every message, buffer and event of the class `kind`.
        kind: see `change`.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, change: Change, kind: type[Any]) -> None:
        monkeypatch.setattr(master_module, "Server", CheckedServer)
        monkeypatch.setattr(handlers_module, "look_here", lambda _: SOUND)
        self.home, self.now, self.faults = StateDir(folder), 1000.0, list[str]()
        self._change, self._kind, self.num_records = change, kind, 0
        self.begin()

    def begin(self) -> None:
        """Start the master, as after its end."""
        self.said: list[str] = []
        config = MasterConfig(self.home, IDENTITY, VERSIONS, {}, 5.0, self.said.append, clock=lambda: self.now)
        self._master = Master(config)
        self.server: Any = self._master.server
        self._handlers = self._master._handlers
        self._handlers.load()
        self._master._scheduler.resume()
        self.connect(ADMIN, Grant())

    def connect(self, peer: int, grant: Grant) -> None:
        self._handlers.on_connected(peer, f"10.0.0.{peer}, port {peer}", grant)

    def changed(self, value: Any) -> Any:
        return self._change.of(value) if type(value) is self._kind else value

    def changes(self, message: Any) -> bool:
        """Return whether messages of this class are changed."""
        return type(message) is self._kind

    def deliver(self, peer: int, header: m.Header, *buffers: Any) -> None:
        """Hand a frame to the master; a frame that it refuses is none."""
        self.now += 0.01
        parts = [one if isinstance(one, bytes) else bytes(memoryview(one).cast("B")) for one in buffers]
        try:
            header = _to_master.decode(msgspec.msgpack.encode(self.changed(header)))
            memory: Any = self._handlers.place(peer, header, tuple(map(len, parts)))
            for room, part in zip(memory or (), parts, strict=False):
                memoryview(room).cast("B")[:] = part
            size = sum(map(len, parts))
            if not (parts and self._handlers.on_part(peer, header, size, True)):
                self._handlers.on_message(peer, header, [memoryview(one) for one in memory or ()])
        except (BadFrame, msgspec.DecodeError):
            pass

    def say(self, peer: int, header: m.Header, part: Any) -> None:
        """Deliver a header with one encoded buffer."""
        self.deliver(peer, header, msgspec.msgpack.encode(self.changed(part)))

    def show(self, peer: int, header: r.RankShown, *events: RunEvent) -> None:
        self.deliver(peer, header, encode_events([self.changed(one) for one in events]))

    def pass_time(self, seconds: float = 0.3) -> None:
        self.now += seconds
        self._master._tick()

    def join(self, peer: int, name: str, key: str = "") -> None:
        self.connect(peer, Grant("node"))
        join = replace(introduction(name), key=key)
        self.deliver(peer, join)
        profile = introduction(name, profiled=True).profile
        assert profile is not None
        self.deliver(peer, m.Profiled(profile=profile))

    def sent(self, kind: type[Any], peer: int | None = None) -> list[tuple[Any, list[bytes]]]:
        """Messages of a class, to all or to one."""
        return [
            (header, parts) for to, header, parts in self.server.sent if isinstance(header, kind) and peer in (None, to)
        ]

    def ask(self) -> ClusterStatus:
        """Return the last status that could be decoded."""
        self.deliver(ADMIN, m.GetStatus())
        replies = self.sent(m.StatusReply, ADMIN)
        return decode_status(replies[-1][1][0]) if replies else ClusterStatus(address="", nodes=())

    def wait_for_disk(self, run: str) -> None:
        """Return when the checkpoint of a run's ranks that has arrived is on the disk."""
        ranks = self._master._scheduler.ranks_of(run)
        while ranks is not None and ranks.checkpoints.is_busy:
            self.pass_time()

    def restart(self) -> None:
        """End the master as a signal does, and start the next one."""
        self.end()
        self.begin()

    def end(self) -> None:
        self.ask()
        self._master.close()
        self.faults += self.server.faults
        self.faults += [one for one in self.said if "cannot be" in one or "set aside" in one]

    def check_files(self) -> None:
        """Decode everything that the master has written, and show it."""
        Members(self.home.members).load()
        if self.home.profile.exists():
            read_noun(self.home.profile, ClusterProfile)
        for folder in self.home.runs.glob("*"):
            live = LiveRun("r")
            for moment in EventTail(folder / EVENTS_FILE).read():
                self.faults += [
                    one.message for one in moment.events if isinstance(one, Event) and one.kind == "damaged line"
                ]
                for event in moment.events:
                    live.take(Moment(moment.time, [event]))
                    progress_words(live.picture(), 80)
            msgspec.json.decode(msgspec.json.encode(live.picture()), type=Picture)
            record = folder / "record.json"
            if record.exists() and record.stat().st_size:
                self.num_records += read_noun(record, TrainRecord).samples_per_second > 0
