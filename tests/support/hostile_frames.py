"""Valid frames with hostile contents: a master, an honest node, and others that send whatever a field can hold.

    PYTHONPATH=src:tests python -m support.hostile_frames --messages 1000000 --seed 1

Everything moves in one thread, so that what is drawn is all that happens. Frames are well-formed; their fields are
drawn from the types of the messages: mostly values that pass, often at the edge, sometimes beyond it; runs, leases and
slices are mostly such as there are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import msgspec.inspect as mi
import psutil
from safetensors.numpy import load

from evener.agreements.settings import AgreementSettings, Sgd, synchronous
from evener.ps.master.master import Master
from evener.ps.node.lease_part import LeasePart
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol import messages as m
from evener.ps.protocol.config import MasterConfig, StateDir
from evener.ps.protocol.directions import ToCommand, ToMaster, ToNode
from evener.ps.protocol.job import Job, decode_job, encode_job
from evener.records.profile import DeviceProfile
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import ConnectionLost
from evener.wire.frame import encode_head
from evener.wire.identity import Address, make_identity
from evener.wire.limits import Limits
from support.linear_engine import BATCH, RATE, SAMPLES, Mood, build, data, gradient, job, serial, weights
from support.master_in_threads import VERSIONS

INTEGERS = (0, 1, -1, 2, 7, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 1e-12, 5e-324, 1e-300, 1e6, 1e100, 1e300, 1.7e308, float("inf"), -float("inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "linear-1",
    "evil",
    "x" * 64,
    "x" * 300,
    "../x",
    "/etc",
    "a\0b",
    "\x1b[2J",
    "a\u202eb",
    "é漢🙂",
    "\ud800",
)
KINDS = [kind for kind in mi.type_info(ToMaster).types if kind.cls is not m.ShutDown]  # type: ignore[attr-defined]
MOST_EVIL = 4
_BEAT_SECONDS = 10.0
"""After which the honest node says something, however busy the machine is: the master excludes who is silent."""
HONEST, RUN = "honest", "linear-1"
SYNC = synchronous(batch=BATCH, outer=Sgd(learning_rate=RATE))


class Drawer:
    """Draws frames.

    Args:
        random: what decides.
        numbers: of leases and slices that there are.
    """

    def __init__(self, random: Random, numbers: list[int]) -> None:
        self._random, self._numbers = random, numbers

    def frame(self) -> tuple[str, bytes, list[bytes]]:
        """A kind of message, its header, and its buffers."""
        random = self._random
        kind = random.choice(KINDS)
        header = self.value(kind)
        return kind.cls.__name__, _encode(header), self._buffers(kind.cls)

    def value(self, kind: mi.Type) -> Any:
        """Something that a field of this type may be sent as."""
        random = self._random
        if random.random() < 0.01:
            return random.choice([None, [], {}, *INTEGERS, *FLOATS, *TEXTS, b"\xff", [[[[]]]], True])
        if isinstance(kind, mi.StructType):
            values = {field.encode_name: self.value(field.type) for field in kind.fields}
            tag = [] if kind.tag is None else [kind.tag]
            return [*tag, *values.values()] if kind.array_like else values
        if isinstance(kind, mi.UnionType):
            return self.value(random.choice(kind.types))
        if isinstance(kind, mi.VarTupleType):
            return [self.value(kind.item_type) for _ in range(random.randrange(3))]
        if isinstance(kind, mi.TupleType):
            return [self.value(one) for one in kind.item_types]
        if isinstance(kind, mi.DictType):
            return {}
        return self._plain(kind)

    def _plain(self, kind: mi.Type) -> Any:
        random = self._random
        if isinstance(kind, mi.IntType):
            if self._numbers and random.random() < 0.4:
                return random.choice(self._numbers) + random.choice((0, 0, 0, 1, 2))
            return random.choice(INTEGERS if random.random() < 0.2 else (0, 1, 2, 3))
        if isinstance(kind, mi.FloatType):
            return random.choice(FLOATS if random.random() < 0.2 else (0.0, 0.001, 1.0))
        if isinstance(kind, mi.StrType):
            if random.random() < 0.1:
                return random.choice(TEXTS)
            return "0" * 64 if kind.pattern and "64" in kind.pattern else random.choice((RUN, "evil", "cpu", ""))
        if isinstance(kind, mi.LiteralType):
            return random.choice(kind.values)
        return random.choice((True, False)) if isinstance(kind, mi.BoolType) else None

    def _buffers(self, kind: type[Any]) -> list[bytes]:
        random = self._random
        if kind is m.SubmitRun and random.random() < 0.8:
            return [self._job(), bytes(random.choice((0, 8, 48)))]
        if kind in (m.Contribution, m.BlobChunk) or random.random() < 0.02:
            return [
                random.randbytes(random.choice((0, 1, 48, 48, 48, 100))) for _ in range(random.choice((0, 1, 1, 1, 2)))
            ]
        return []

    def _job(self) -> bytes:
        fields = msgspec.msgpack.decode(encode_job(job(SYNC, run="evil")))
        for field in mi.type_info(Job).fields:  # type: ignore[attr-defined]
            if self._random.random() < 0.2:
                fields[field.name] = self.value(field.type)
        return _encode(fields)


def _encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):  # what no message can hold
        return msgspec.msgpack.encode(None)


class Stage:
    """A master, an honest node in a run, and hostile peers.

    Args:
        random: decides everything.
        agreement: of the run.
        epochs: of the run.
    """

    def __init__(self, random: Random, agreement: AgreementSettings = SYNC, epochs: int = 4) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="evener-"))
        self._random, self._numbers = random, list[int]()
        self._drawer = Drawer(random, self._numbers)
        self.said: list[str] = []
        self.sent: Counter[str] = Counter()
        identity = make_identity(insecure=True)
        self._token = identity.token
        home = StateDir(self.folder / "home")
        self.master = Master(MasterConfig(home, identity, VERSIONS, {}, 60.0, self._say))
        self._address = self.master.listen(Address(path=str(self.folder / "socket")))
        self._evil: list[Connection[m.Header]] = []
        self._session: LeasePart | None = None
        self.result: m.RunFinished | None = None
        self._honest, self._command = self._connect(ToNode), self._connect(ToCommand)
        self._heard = time.monotonic()
        self._send(self._honest, self._introduction())
        self._command.send(m.SubmitRun(), [encode_job(job(agreement, epochs=epochs)), weights().memory])
        while self._session is None:
            self.be_honest()

    def be_hostile(self) -> None:
        """One hostile message, over a new connection or one that there is; the honest node beats as nodes do."""
        if time.monotonic() - self._heard > _BEAT_SECONDS:
            self.be_honest()
        if len(self._evil) < MOST_EVIL and self._random.random() < 0.2:
            self._evil.append(self._connect(ToNode))
        if not self._evil:
            return
        connection = self._random.choice(self._evil)
        kind, header, buffers = self._drawer.frame()
        if kind == "Join" or self._random.random() < 0.05:
            kind, header, buffers = (
                "Join",
                msgspec.msgpack.encode(self._introduction(f"evil-{self._random.randrange(5)}")),
                [],
            )
        if _is_of_the_honest(header):
            return
        self.sent[kind] += 1
        try:
            head = encode_head(connection._sequence, header, [len(buffer) for buffer in buffers])
            connection._transport.send([memoryview(part) for part in (head, *buffers) if part])
            connection._sequence += 1
            if self._random.random() < 0.02:
                raise ConnectionLost("it leaves")
        except (OSError, ConnectionLost):
            connection.close()
            self._evil.remove(connection)
        self._step()

    def join_over_one_connection(self, *names: str) -> None:
        """Somebody hostile joins under these names, one after the other."""
        self._evil.append(connection := self._connect(ToNode))
        for name in names:
            self._send(connection, self._introduction(name))
            for _ in range(20):
                self._step()

    def be_honest(self) -> None:
        """What the honest node and the command do with what has come to them."""
        self._heard = time.monotonic()
        self._send(self._honest, m.Heartbeat())
        self._step()
        while self._honest.wait(0.0):
            self._take(self._honest.receive())
        while self._session is not None and self._session.can_work:
            self._session.work()
        while self.result is None and self._command.wait(0.0):  # whoever says nothing after the run is left
            header = self._command.receive().header
            if isinstance(header, m.RunFinished):
                self.result = header

    def finish(self) -> None:
        """The hostile leave; the run goes to its end."""
        for connection in self._evil:
            connection.close()
        self._evil.clear()
        while self.result is None:
            self.be_honest()

    def close(self) -> None:
        """End everything."""
        for connection in (*self._evil, self._honest, self._command):
            connection.close()
        self.master.close()
        shutil.rmtree(self.folder)

    def _step(self, seconds: float = 0.0) -> None:
        """What a step of the master is, which waits hardly or not for something to happen."""
        for event in self.master.server.poll(seconds):
            self.master._on_event(event)
        self.master._tick()

    def _take(self, frame: Any) -> None:
        header, session = frame.header, self._session
        if isinstance(header, m.Prepare) and session is None:
            config = NodeConfig(HONEST, "cpu", 1.0, None, self.folder, VERSIONS, _measure, build(Mood(seconds=0.0)))
            self._session = LeasePart(
                decode_job(frame.buffers[0]), config, lambda h, *b: self._send(self._honest, h, *b), lambda: None
            )
            self._session.start()
        elif isinstance(header, m.ServerReply) and session is not None:
            if header.answer.lease is not None:
                self._numbers[:] = [*self._numbers[-5:], header.answer.lease.number]
            session.on_reply(header, frame.buffers)
        elif isinstance(header, m.Validate) and session is not None:
            self._numbers[:] = [*self._numbers[-5:], *(part.number for part in header.slices)]
            session.validate(header, frame.buffers)

    def _connect(self, headers: Any) -> Connection[m.Header]:
        found: list[Connection[m.Header]] = []
        limits = Limits(patience=60.0)
        dialling = threading.Thread(
            target=lambda: found.append(open_connection(self._address, self._token, headers, limits))
        )
        dialling.start()
        while dialling.is_alive():
            self._step(0.001)
        return found[0]

    def _send(self, connection: Connection[m.Header], header: m.Header, *buffers: Any) -> None:
        connection.send(header, buffers)

    def _introduction(self, name: str = HONEST) -> m.Join:
        return m.Join(
            protocol=m.PROTOCOL_VERSION,
            name=name,
            incarnation=1,
            evener="0",
            python="3.11",
            torch="",
            clock=0.0,
            device="cpu",
            profile=_measure(name),
        )

    def _say(self, sentence: str) -> None:
        self.said[:] = [*self.said[-20:], sentence]


def _is_of_the_honest(header: bytes) -> bool:
    """Whether a frame would be an act that the token allows: to stop the run, or to take part in it."""
    return RUN.encode() in header and (b"StopRun" in header or b"Ready" in header[:10])


def _measure(name: str = HONEST) -> DeviceProfile:
    return DeviceProfile(node=name, device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)


def main() -> None:
    """Send hostile messages for as long as asked; say what became of the master, and of the run beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    epochs = max(4, given.messages // 4000)
    stage = Stage(Random(given.seed), epochs=epochs)
    process, before = psutil.Process(), 0
    while stage.sent.total() < given.messages:
        stage.be_hostile()
        if stage._random.random() < 0.001:  # so that the run is not over long before the last message
            stage.be_honest()
        if not before and stage.sent.total() > given.messages // 10:
            before = process.memory_info().rss
    grown = process.memory_info().rss / before - 1
    stage.finish()
    assert stage.result is not None
    sys.stdout.write(f"{dict(stage.sent)}\nmemory {grown:+.1%}, ended by {stage.result.kind}\n")
    found = load((stage.folder / "home" / "runs" / RUN / "model.safetensors").read_bytes())
    for who, one in (("beside them", found), ("one process", serial(epochs))):
        sys.stdout.write(f"loss after {epochs} epochs, {who}: {gradient(one['w'], one['b'], *data(SAMPLES, 1))[2]!r}\n")
    stage.close()


if __name__ == "__main__":
    main()
