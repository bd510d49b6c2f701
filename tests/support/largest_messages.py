"""Every message that a token allows, at its largest, many times: what becomes of a master's memory, disk and answers.

    PYTHONPATH=src:tests python -m support.largest_messages --count 1000 [--only RankShown.0]

A master runs as a process of its own. Somebody with a node's or a submitter's token sends, and takes no answer, while
an admin asks for the status all the time. What is sent is found from the types of the messages.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import msgspec.inspect as mi
import psutil
from msgspec.structs import replace

from evener.membership.generation import Beat, Hello
from evener.membership.shared_values import AskValues, SetValue
from evener.ps.client import MasterClient, find_master
from evener.ps.master.access.quotas import MAX_BUFFER_BYTES
from evener.ps.master.handlers import may_send
from evener.ps.protocol import messages as m
from evener.ps.protocol import rank_messages as r
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.directions import ToCommand, ToMaster, ToNode
from evener.ps.protocol.examination_messages import TaskQuestion, encode_part
from evener.ps.protocol.job import MAX_JOB_BYTES, encode_job
from evener.records.events import MAX_EVENTS_BYTES, Phase, encode_events
from evener.records.profile import PRECISIONS, DeviceProfile, Throughput
from evener.records.record import Event, NodeStep, Step, TrainRecord
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotJoin, ConnectionLost
from evener.wire.frame import encode_frame
from evener.wire.identity import Address, Role, Token
from evener.wire.limits import Limits
from support.agreements import SYNC
from support.command_cluster import Cluster, cluster, wait_until
from support.fake_runs import fake_plan
from support.linear_engine import job, weights

KINDS: list[type[Any]] = [kind.cls for kind in mi.type_info(ToMaster).types]  # type: ignore[attr-defined]
RUN, NAME = "ranks", "evil"
LIMITS = Limits(patience=10.0)
_MOST_HEADER = 60_000
_WEIGHTS = 2**20
_ASK_SECONDS = 0.05
PROFILE = DeviceProfile(node=NAME, device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)


def largest(kind: Any) -> Any:
    """The largest value of a type that its bounds allow, as it travels; of lists as much as a header holds."""
    if isinstance(kind, mi.StructType):
        fields = [[] if field.name == "widths" else largest(field.type) for field in kind.fields]
        if kind.array_like:
            return fields if kind.tag is None else [kind.tag, *fields]
        return dict(zip([field.encode_name for field in kind.fields], fields, strict=True))
    if isinstance(kind, mi.UnionType):
        return largest(next(one for one in kind.types if not isinstance(one, mi.NoneType)))
    if isinstance(kind, mi.Metadata):
        return largest(kind.type)
    if isinstance(kind, mi.VarTupleType):
        one = largest(kind.item_type)
        most = _MOST_HEADER // (8 * len(msgspec.msgpack.encode(one)))
        return [one] * (most if kind.max_length is None else min(most, kind.max_length))
    if isinstance(kind, mi.DictType):
        return {}
    if isinstance(kind, mi.StrType):
        if kind.pattern is not None and "0-9a-f" in kind.pattern:
            return "f" * 64
        return "x" * (kind.max_length or 0)
    if isinstance(kind, mi.IntType):
        return 2**53 if kind.le is None else kind.le
    if isinstance(kind, mi.FloatType):
        return 0.25
    if isinstance(kind, mi.LiteralType):
        return kind.values[0]
    return True if isinstance(kind, mi.BoolType) else None


LARGE_PROFILE = replace(
    PROFILE,
    model="x" * 256,
    throughputs=tuple(Throughput(precision=one, matmul_flops=1e12, reason="x" * 950) for one in PRECISIONS),
    address="x" * 256,
    leaf="x" * 256,
)


@cache
def _largest_of(kind: Any) -> Any:
    return msgspec.convert(largest(mi.type_info(kind)), kind)


def largest_header(kind: type[Any], **fields: Any) -> m.Header:
    """A header of this type that is as large as one may be, but for these fields."""
    found = _largest_of(cast(Hashable, kind))
    own = {field: value for field, value in fields.items() if field in kind.__struct_fields__}
    return replace(found, **own)  # type: ignore[no-any-return]


def _events(most: int, event: Any) -> bytes:
    """A buffer of at most `most` bytes of events."""
    one = len(encode_events([event])) - 1
    return encode_events([event] * ((most - 2) // one))


def buffers_of(kind: type[Any], number: int) -> list[list[Any]]:
    """The largest buffers that a message may bring, for every meaning that they can have."""
    if kind is not r.RankSaid:
        return _buffers_of(cast(Hashable, kind), number % 7)
    most = MAX_BUFFER_BYTES[kind]
    said = [
        SetValue(number=number, key=f"k{number}", value=bytes(most[0] - 100)),
        SetValue(number=number, key=f"{number}" + "k" * 500, value=b""),
        SetValue(number=number, key="again", value=bytes(most[0] - 100)),
        AskValues(number=number, keys=("again",) * 100_000, waits=False),
        AskValues(number=number, keys=(f"missing{number}" * 30,) * 3000, waits=True),
        Hello(node="x" * 200, initial_nodes=("x" * 250,) * 1024),
        Beat(count=number, step=number, holds=0),
    ]
    return [[msgspec.msgpack.encode(one)] for one in said]


@cache
def _buffers_of(kind: Any, number: int) -> list[list[Any]]:
    most = MAX_BUFFER_BYTES.get(kind, ())
    if kind is r.RankShown:
        node = NodeStep(samples=1, io_seconds=0, compute_seconds=0, wait_seconds=0, update_seconds=0, sent_bytes=0)
        events = [
            Event(step=1, kind="left out", message="x" * 1000, nodes=("n",)),
            Phase(what="x" * 2**20),
            Step(step=number, epoch=0, samples=1, loss=0.0, seconds=1.0, nodes=(node,) * (1 + number % 7)),
            Step(step=number, epoch=0, samples=1, loss=0.0, seconds=1.0, nodes=(node,) * 50_000),
        ]
        large = msgspec.structs.replace(RECORD, steps=tuple(RECORD.steps) * (most[0] // len(encode_events([RECORD]))))
        sizes = [(size, one) for one in events for size in (most[0], MAX_EVENTS_BYTES)]
        return [*([_events(size, one)] for size, one in sizes), [encode_events([large])]]
    if kind is e_examine:
        question = TaskQuestion(task="x" * 200, code="f" * 64, options={f"{i}": "x" * 4000 for i in range(15)})
        return [[encode_part(question), bytes(most[1])], []]
    if kind is m.SubmitRun:
        options = {f"{i}": "x" * 4000 for i in range(MAX_JOB_BYTES // 4100)}
        resting = replace(job(SYNC, run=f"rest-{number}"), nodes=(), options=options)
        ranks = r.encode_rank_part(replace(rank_job(), config=bytes(r.MAX_RANK_JOB_BYTES - 1000)))
        return [[encode_job(resting), weights().memory], [bytes(MAX_JOB_BYTES), bytes(_WEIGHTS)], [ranks]]
    if kind is m.Contribution:
        return [[bytes(48)], [bytes(_WEIGHTS)]]
    if kind is r.RankEnded:
        return [[bytes(32 * 2**20)], []]
    return [[bytes(size) for size in most]] if most else [[]]


RECORD = TrainRecord(
    task="t", plan=fake_plan(), seed=1, epochs=1, precision="fp32", seconds=1.0, samples_per_second=1.0,
    final_loss=None, validation_accuracy=None, startup_seconds=0.0,
    steps=(Step(step=1, epoch=0, samples=1, loss=0.0, seconds=1.0, nodes=(NodeStep(
        samples=1, io_seconds=0, compute_seconds=0, wait_seconds=0, update_seconds=0, sent_bytes=0),) * 3),) * 4,
)  # fmt: skip


def rank_job() -> r.RankJob:
    return r.RankJob(run=RUN, task="digits", title="digits", config=b"")


e_examine: type[Any] = next(kind for kind in KINDS if kind.__name__ == "ExamineNodes")


@dataclass
class Found:
    """The state of a master after the messages.

    Attributes:
        what: was sent.
        before, after: bytes of its memory before anything was sent, and when this was.
        peak: bytes of its memory, meanwhile.
        disk: bytes that its home has grown by since before.
        slowest: seconds that an admin waited for an answer.
        undisturbed: the same without the seconds in which master or admin waited for a processor of a busy machine.
        sent: frames.
        closed: connections.
    """

    what: str
    before: int
    after: int
    peak: int
    disk: int
    slowest: float
    undisturbed: float
    sent: int
    closed: int

    @property
    def growth(self) -> float:
        return self.after / self.before - 1

    def __str__(self) -> str:
        mb = 2.0**20
        return (
            f"{self.what:46} {self.before / mb:6.1f} -> {self.after / mb:6.1f} MB ({self.growth:+5.0%}), peak "
            f"{self.peak / mb:6.1f}, disk {self.disk / mb:+7.2f} MB, slowest {self.slowest:5.2f} s "
            f"({self.undisturbed:.2f} undisturbed), "
            f"{self.sent} sent, {self.closed} closed"
        )


class Watcher:
    """Asks for the status as an admin does, and looks at the memory, in a thread.

    Args:
        ps: the master.

    Attributes:
        slowest: seconds that an admin waited at most for an answer.
        undisturbed: the same without the seconds in which master or admin waited for a processor of a busy machine.
        peak: bytes of its memory at most.
    """

    def __init__(self, ps: Cluster) -> None:
        self._home, self.process = StateDir(ps.home), psutil.Process(ps.master.pid)
        self._is_over = threading.Event()
        self.slowest, self.undisturbed, self.peak, self.error = 0.0, 0.0, 0, ""
        self._thread = threading.Thread(target=self._run)

    @property
    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    def begin(self) -> None:
        """Forget what was the most until now."""
        self.slowest, self.undisturbed, self.peak = 0.0, 0.0, 0

    @property
    def busy(self) -> float:
        """Seconds that the master has computed."""
        return sum(self.process.cpu_times()[:2])

    @property
    def _waited(self) -> float:
        """Seconds for which the master and this thread were ready, and did not get a processor."""
        files = (f"/proc/{self.process.pid}/schedstat", "/proc/thread-self/schedstat")
        return sum(int(Path(file).read_text().split()[1]) for file in files) / 1e9

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert not self.error, self.error

    def _run(self) -> None:
        try:
            with MasterClient(*find_master(self._home, None, None)) as admin:
                while not self._is_over.wait(_ASK_SECONDS):
                    began, waited = time.monotonic(), self._waited
                    admin.ask()
                    seconds = time.monotonic() - began
                    self.slowest = max(self.slowest, seconds)
                    self.undisturbed = max(self.undisturbed, seconds - self._waited + waited)
                    self.peak = max(self.peak, self.memory)
            began = time.monotonic()
            with MasterClient(*find_master(self._home, None, None)) as admin:  # who comes anew
                admin.ask()
            self.slowest = max(self.slowest, time.monotonic() - began)
        except Exception as error:
            self.error = f"the admin was not answered: {type(error).__name__}: {error}"


def disk_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Evil:
    """Somebody who sends and takes no answer; comes again when it was left.

    Args:
        address: of the master.
        token: for this role.
        role: of its token.
        state: `stranger`, `node`, `in a run` or `a rank`.
        name: of its node.
    """

    def __init__(self, address: str, token: str, role: Role, state: str, name: str = NAME) -> None:
        self._address, self.state, self._role, self._name = Address.parse(address), state, role, name
        self._token = Token.parse(token)
        self.sent = self.closed = self.process = 0
        self.run = "linear-1" if state == "beside a run" else RUN
        self._incarnation, self._is_prepared = time.time_ns(), False
        self.connection: Connection[m.Header] | None = None

    def come(self) -> None:
        """Connect, and be what it is to be."""
        kinds: Any = ToCommand if self._role == "submitter" else ToNode
        until = time.monotonic() + 20
        while True:
            try:
                self.connection = open_connection(self._address, self._token, kinds, LIMITS)
                break
            except CannotJoin:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        if self.state == "stranger" or self._role == "submitter":
            return
        join = m.Join(
            protocol=m.PROTOCOL_VERSION, name=self._name, incarnation=self._incarnation, evener="0", python="3",
            torch="", clock=time.time(), device="cpu", profile=PROFILE,
        )  # fmt: skip
        self.connection.send(join)
        with suppress(ConnectionLost):  # the run may be over, because of what was sent
            self._begin(self.connection)

    def _begin(self, connection: Connection[m.Header]) -> None:
        """Take part in the run, where there is one."""
        self.connection = connection
        if self.state == "in a run" and not self._is_prepared:
            self.run, self._is_prepared = self._until(m.Prepare).run, True
            self.connection.send(m.Ready(run=self.run, unit_seconds=1e-3))
        elif self.state == "a rank":
            run = self._until(r.PrepareRank).run
            self.run, self.process = run, self.process if self.run == run else 0
            self.connection.send(r.RankReady(run=self.run, process=self.process, speed=1.0))
            if not self.process:
                self.process = self._until(r.StartRank).process
                for message in (Hello(node=self._name, initial_nodes=(self._name,)), Beat(count=1, step=1, holds=1)):
                    said = msgspec.msgpack.encode(message)
                    self.connection.send(r.RankSaid(run=self.run, process=self.process), [said])

    def send(self, header: m.Header, buffers: Sequence[Any]) -> None:
        """Send a frame, over another connection if this one is closed."""
        if self.connection is None:
            self.come()
        connection = self.connection
        assert connection is not None
        try:
            self._push(connection, header, buffers)
            self.sent += 1
        except (ConnectionLost, OSError):
            self.closed += 1
            self.leave()

    def leave(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _push(self, connection: Connection[m.Header], header: m.Header, buffers: Sequence[Any]) -> None:
        """Send all of a frame; nothing is read, but the end of the connection is seen."""
        views = encode_frame(connection._sequence, header, buffers, LIMITS)
        connection._sequence += 1
        sock, until = connection._transport.sock, time.monotonic() + 20
        sock.setblocking(False)
        from evener.wire.frame import drop_sent

        while views or connection._transport.has_unsent:
            try:
                if views:
                    drop_sent(views, connection._transport.send(views))
                else:
                    connection._transport.flush()
            except BlockingIOError:
                poll = select.poll()
                poll.register(sock, select.POLLOUT | select.POLLRDHUP)
                ready = poll.poll(1000)
                if any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in ready):
                    raise ConnectionLost("it was closed") from None
                if time.monotonic() > until:
                    raise ConnectionLost("the master reads nothing more") from None

    def _until(self, kind: type[m.Header]) -> Any:
        assert self.connection is not None
        until = time.monotonic() + 5
        while not isinstance(header := self.connection.receive().header, kind):
            if time.monotonic() > until or isinstance(header, m.Quarantine):  # after it was lost again and again
                raise ConnectionLost(f"no {kind.__name__} came")
        return header


STATES: list[tuple[Role, str]] = [
    ("node", "stranger"),
    ("node", "node"),
    ("node", "in a run"),
    ("node", "a rank"),
    ("submitter", "submitter"),
    ("submitter", "beside a run"),
]
_LAST = (m.NotReady, m.Notice, m.Leave, r.RankEnded, m.Join)
"""After which a node has no part in a run any more."""


def kinds_for(role: Role, state: str) -> list[tuple[type[Any], int]]:
    """Types of messages, and numbers of their meanings; of those that are refused, the largest ones."""
    few = {"stranger": (m.Join, m.Heartbeat, m.SubmitRun, m.BlobChunk, r.RankShown, r.RankEnded, e_examine)}
    kinds = [kind for kind in few.get(state, KINDS) if may_send(role, kind) or state == "stranger"]
    kinds = [*(kind for kind in kinds if kind not in _LAST), *(kind for kind in _LAST if kind in kinds)]
    return [(kind, meaning) for kind in kinds for meaning in range(len(buffers_of(kind, 0)))]


@contextmanager
def set_up(role: Role, state: str) -> Iterator[tuple[Cluster, Evil]]:
    """A master in the state for a case, and who is to send."""
    with cluster("--insecure") as ps:
        evil = Evil(ps.address, (ps.home / "tokens" / role).read_text(), role, state)
        with MasterClient(*find_master(StateDir(ps.home), None, None)) as admin:
            if state in ("in a run", "a rank", "beside a run"):
                submit(admin, state)
            evil.come()
            if role == "node" and state != "stranger":
                wait_until(lambda: admin.ask().nodes, "that the node is in")
        yield ps, evil


def try_state(
    role: Role, state: str, count: int, only: str = "", tell: Callable[[Found], None] = lambda _: None
) -> list[Found]:
    """Send every message so many times, all to one master: what became of it after each type."""
    found = []
    with set_up(role, state) as (ps, evil), Watcher(ps) as watcher:
        evil.send(m.Heartbeat(), [])
        time.sleep(0.5)
        before, disk = watcher.memory, disk_of(ps.home)
        for kind, meaning in kinds_for(role, state):
            if only in f"{kind.__name__}.{meaning}":
                _have_run(ps, evil)
                watcher.begin()
                evil.sent = evil.closed = 0
                for number in range(count):
                    _send(evil, kind, meaning, number)
                if kind is m.Join:
                    evil.leave()
                    evil.state = state
                _settle(watcher, before)
                what = f"{kind.__name__}.{meaning} of a {role}, {state}"
                one = Found(
                    what, before, watcher.memory, watcher.peak, disk_of(ps.home) - disk, watcher.slowest,
                    watcher.undisturbed, evil.sent,
                    evil.closed,
                )  # fmt: skip
                tell(one)
                found.append(one)
        evil.leave()
        if tell is _print and (ps.home / "audit.jsonl").exists():
            log = [json.loads(line) for line in (ps.home / "audit.jsonl").read_text().splitlines()]
            for (what, detail), times in Counter((one["what"], one["detail"][-90:]) for one in log).most_common(12):
                sys.stdout.write(f"    {times:5} {what}: {detail}\n")
    return found


def _have_run(ps: Cluster, evil: Evil) -> None:
    """Submit the run again, if it has ended because of what was sent."""
    if evil.state in ("in a run", "a rank", "beside a run"):
        with MasterClient(*find_master(StateDir(ps.home), None, None)) as admin:
            if not admin.ask().runs:
                submit(admin, evil.state)
                evil.leave()


def submit(admin: MasterClient, state: str) -> None:
    if state == "a rank":
        admin.submit(rank_job(), None, [])
    else:
        admin.submit(job(SYNC, epochs=10**6), weights(), [])


def _send(evil: Evil, kind: type[Any], meaning: int, number: int) -> None:
    fields: dict[str, Any] = {"run": evil.run, "process": evil.process, "protocol": m.PROTOCOL_VERSION}
    if kind is m.Join:  # one over each connection
        evil.leave()
        evil.state = "stranger"
        fields |= {"name": f"n{number}", "incarnation": 1, "key": f"{number:064x}", "is_named": True}
        fields["profile"] = LARGE_PROFILE
    if kind is r.RankSaved:
        fields |= {"digest": f"{number:064x}", "step": number + 1}
    evil.send(largest_header(kind, **fields), buffers_of(kind, number)[meaning])
    if kind is r.RankEnded:
        evil.process = 0


def _settle(watcher: Watcher, before: int) -> None:
    """Wait until the master has dealt with what it has, and holds no frame that has not come whole."""
    busy = watcher.process.cpu_times().user
    for _ in range(40):
        time.sleep(0.3)
        now = watcher.process.cpu_times().user
        if now - busy < 0.15 and watcher.memory < 1.15 * before:
            return
        busy = now


def _print(found: Found) -> None:
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()


def main() -> None:
    """Try all cases, or some, and say what became of the master."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--state", default="")
    parser.add_argument("--small", type=float, default=0.0, help="instead: seconds of small frames of each type")
    given = parser.parse_args()
    if given.small:
        from support.small_frames import show_all

        show_all(given.small, given.only, given.state)
        return
    for role, state in STATES:
        if given.state in state:
            try_state(role, state, given.count, given.only, _print)


if __name__ == "__main__":
    main()
