"""What bounds each queue, file and answer that a peer can grow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from evener.membership.shared_values import (
    MAX_ANSWER_BYTES,
    MAX_NODE_BYTES,
    MAX_QUESTIONS,
    AskValues,
    SetValue,
    SharedValues,
    Values,
)
from evener.ps.master.access.quotas import (
    MAX_ARRIVING_BYTES,
    MAX_EVENT_BYTES,
    MAX_FETCHES,
    MAX_FETCHING,
    MAX_PROFILE_BYTES,
    Allowance,
    Arrivals,
    require_small,
)
from evener.ps.master.handlers import Fetches
from evener.ps.master.ranks.rank_journal import RankJournal, RunStart, roster_of
from evener.ps.master.ranks.rank_table import RankNews
from evener.ps.master.run_journal import RunJournal
from evener.ps.protocol.blob_stream import StreamWriter
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.job import MAX_JOBS_BYTES
from evener.ps.protocol.messages import FetchBlob, StatusReply
from evener.ps.protocol.rank_messages import RankJob
from evener.records.errors import InvalidInput
from evener.records.event_log import EventLog
from evener.records.events import MAX_EVENTS_BYTES, Phase, encode_events, sized_events
from evener.records.history import History
from evener.records.record import Event, NodeStep, Step
from evener.wire.connection import Peer
from evener.wire.errors import BadFrame
from evener.wire.limits import Limits
from evener.wire.reader import FrameReader
from evener.wire.server import Server
from support.agreements import SYNC
from support.fake_runs import fake_plan
from support.largest_messages import LARGE_PROFILE, RECORD
from support.linear_engine import job, weights
from support.master_in_threads import plane, wait_until
from support.refusals import refused
from support.strangers import introduction, refusals, stranger, told_until_closed

JOB = RankJob(run="r", task="t", title="t", config=b"")
NODE = NodeStep(samples=1, io_seconds=0, compute_seconds=0, wait_seconds=0, update_seconds=0, sent_bytes=0)


def step(number: int, columns: int = 2) -> Step:
    return Step(step=number, epoch=0, samples=1, loss=0.0, seconds=1.0, nodes=(NODE,) * columns)


def ask(values: SharedValues, message: Any, owner: str = "a", process: int = 1) -> list[tuple[int, Values]]:
    return list(values.answers(process, message, owner))


def leave_without_end(values: SharedValues) -> None:
    for number in range(100_000):
        ask(values, SetValue(number=number, key=f"k{number}", value=b""))


def wait_without_end(values: SharedValues) -> None:
    for number in range(MAX_QUESTIONS + 1):
        ask(values, AskValues(number=number, keys=("missing",), waits=True))


def test_values_set_by_one_node_are_bounded() -> None:
    values = SharedValues()
    with pytest.raises(InvalidInput):
        leave_without_end(values)
    assert len(values.by_key) < MAX_NODE_BYTES // 100
    assert ask(values, SetValue(number=1, key="other", value=bytes(1000)), owner="b")
    ask(values, SetValue(number=1, key="k0", value=b"1"), owner="b")  # another node writes what this one has left
    assert ask(values, SetValue(number=2, key="more", value=b""))


def test_pending_value_requests_are_bounded_and_deduplicated() -> None:
    values = SharedValues()
    for _ in range(1000):
        assert ask(values, AskValues(number=1, keys=("missing",), waits=True)) == []
    with pytest.raises(InvalidInput):
        wait_without_end(values)
    with pytest.raises(InvalidInput):
        ask(values, AskValues(number=1, keys=("x" * 1000,) * 2000, waits=True), process=2)
    assert ask(values, AskValues(number=1, keys=("missing",), waits=True), process=3) == []
    answered = ask(values, SetValue(number=9, key="missing", value=b"v"), owner="b", process=4)
    assert (3, Values(number=1, values=(b"v",))) in answered


def test_request_for_one_value_100_000_times_is_rejected() -> None:
    values = SharedValues()
    ask(values, SetValue(number=1, key="k", value=bytes(MAX_ANSWER_BYTES // 10)))
    assert ask(values, AskValues(number=2, keys=("k",) * 9, waits=False))
    with pytest.raises(InvalidInput):
        ask(values, AskValues(number=3, keys=("k",) * 100_000, waits=False))


def test_pending_events_of_ranks_are_bounded() -> None:
    now = [0.0]
    news = RankNews(lambda: now[0])
    message = Event(step=1, kind="left out", message="x" * 1000)
    for _ in range(1000):
        news.add([(1100, message)])
        news.note("away", "x" * 1000, ("n",))
        news.add([(500, step(1, 2)), (500, step(2, 3))])  # of which the log makes two lines
    shown = news.take()
    assert sum(isinstance(event, Event) for event in shown) < 600
    assert len(shown) < 1200
    news.add([(500, step(number)) for number in range(100_000)])
    assert 1000 < len(news.take()) < 3000
    now[0] += 60.0
    news.add([(1100, message)])
    assert news.take() == [message]


def test_plan_that_arrives_twice_is_shown_once() -> None:
    news = RankNews()
    one, other = fake_plan(), fake_plan((50, 28, 5))
    news.add([(1, one), (1, one), (1, other)])
    news.add([(1, other)])
    assert news.take() == [one, other]


def test_oversized_event_messages_are_rejected_unless_one_record() -> None:
    large = encode_events([Event(step=1, kind="k", message="x" * MAX_EVENTS_BYTES)])
    many = encode_events([RECORD] * (MAX_EVENTS_BYTES // 1000))
    for data in (large, many):
        with pytest.raises(msgspec.DecodeError):
            list(sized_events(data, 1000))
    record = replace(RECORD, steps=RECORD.steps * 2000)
    assert [event for _, event in sized_events(encode_events([record]), 1000)] == [record]
    assert list(sized_events(encode_events([Phase(what="x" * 2000)]), 1000)) == []


def test_latest_record_replaces_earlier_ones_and_can_be_deleted() -> None:
    news = RankNews()
    assert (news.has_record, news.record) == (False, b"")
    news.add([(1, RECORD)])
    news.add([(1, replace(RECORD, epochs=2))])
    assert msgspec.json.decode(news.record)["epochs"] == 2
    news.forget_record()
    assert not news.has_record


def test_event_log_coarsens_as_it_grows_and_stops_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.records.event_log._COARSER_BYTES", 20_000)
    now, told = [0.0], list[str]()
    path = tmp_path / "events.jsonl"
    log = EventLog(path, told.append, lambda: now[0], most_bytes=200_000)
    sizes = []
    for number in range(40_000):
        now[0] += 0.25
        log.add(step(number + 1))
        if number % 10_000 == 9_999:
            sizes.append(path.stat().st_size)
    assert sizes[0] > 40_000
    assert sizes[3] - sizes[2] < (sizes[0]) / 5
    for _ in range(1000):
        log.add(Event(step=1, kind="k", message="x" * 1000))
    log.close()
    assert path.stat().st_size <= 200_000
    assert len(told) == 1


def test_events_of_a_run_are_bounded_in_bytes() -> None:
    journal = RunJournal(History(), lambda: 0.0)
    for _ in range(10_000):
        journal.note(1, "left out", "x" * 4000, ("n",))
    kept = journal.history.events
    assert sum(len(event.message) for event in kept) <= MAX_EVENT_BYTES
    assert [event.kind for event in kept].count("more events") == 1


def test_rank_journal_is_compacted_and_keeps_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.ps.master.ranks.rank_journal._MIN_COMPACTED_BYTES", 20_000)
    journal = RankJournal(StateDir(tmp_path), "r", lambda _: None)
    journal.add(RunStart(job=JOB, secret=b"s"))
    for number in range(2000):
        journal.add(roster_of({f"n{number}": number}, [], number + 1, None))
    size = (tmp_path / "run" / "ranks-r.journal").stat().st_size
    journal.close()
    assert size < 25_000
    found = RankJournal(StateDir(tmp_path), "r", lambda _: None).load()
    assert found is not None
    assert (found.roster.names, found.begun.secret) == (("n1999",), b"s")


def test_allowance_permits_a_burst_and_a_rate() -> None:
    now = [0.0]
    allowance = Allowance(100, 10, lambda: now[0])
    assert [allowance.take(60), allowance.take(60), allowance.take(40), allowance.take(1)] == [True, False, True, False]
    now[0] += 3
    assert [allowance.take(30), allowance.take(1)] == [True, False]
    now[0] += 1000
    assert [allowance.take(101), allowance.take(100)] == [False, True]


def test_incoming_bytes_of_all_peers_are_bounded_for_each_role() -> None:
    failed: list[int] = []
    arrivals = Arrivals(lambda peer, _: failed.append(peer))
    most = MAX_ARRIVING_BYTES["node"]
    arrivals.begin(1, most - 1, "node")
    arrivals.begin(2, 0, "node")
    arrivals.begin(3, 1, "node")
    for peer, role in ((4, "submitter"), (5, "admin")):
        arrivals.begin(peer, MAX_ARRIVING_BYTES[role], role)  # type: ignore[index, arg-type]
    assert failed == []
    with pytest.raises(BadFrame):
        arrivals.begin(6, most + 1, "node")
    arrivals.end(1)
    arrivals.begin(6, most - 1, "node")
    assert failed == []


def test_message_that_arrives_slowest_makes_room_for_a_new_one() -> None:
    failed: list[int] = []
    arrivals = Arrivals(lambda peer, _: failed.append(peer))
    for peer in (1, 2, 3):
        arrivals.begin(peer, MAX_ARRIVING_BYTES["node"] // 3, "node")
    arrivals.move(1)
    arrivals.begin(4, 1, "node")
    assert failed == [2]
    arrivals.begin(5, MAX_ARRIVING_BYTES["node"], "node")
    assert failed == [2, 3, 1, 4]


class Waiting:
    """A server of which every peer that was given something takes it later, or never."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self.given: list[int] = []
        self.failed: list[int] = []
        self.now = 0.0

    def fetches(self) -> Fetches:
        return Fetches(self, self.give, lambda: self.now, 60.0)  # type: ignore[arg-type]

    def num_waiting(self, peer: int) -> int:
        return self.waiting.get(peer, 0)

    def give(self, peer: int, _: FetchBlob) -> None:
        self.given.append(peer)
        self.waiting[peer] = 1

    def fail(self, peer: int, _: Exception) -> None:
        self.failed.append(peer)


FETCH = FetchBlob(digest="0" * 64, offset=0)


def test_next_chunk_is_read_after_the_last_one_was_taken() -> None:
    server = Waiting()
    fetches = server.fetches()
    for _ in range(MAX_FETCHES + 1):
        fetches.ask(1, FETCH)
    assert server.given == [1]
    with pytest.raises(BadFrame):
        fetches.ask(1, FETCH)
    for _ in range(MAX_FETCHES):
        server.waiting.clear()
        fetches.serve()
    assert server.given == [1] * (MAX_FETCHES + 1)


def test_peers_that_take_no_chunks_are_bounded_and_others_are_served() -> None:
    server = Waiting()
    fetches = server.fetches()
    for peer in range(MAX_FETCHING + 5):
        fetches.ask(peer, FETCH)
    assert len(server.given) == MAX_FETCHING
    del server.waiting[0]
    fetches.disconnected(MAX_FETCHING)
    fetches.serve()
    assert server.given[MAX_FETCHING:] == [MAX_FETCHING + 1]


def test_peer_that_takes_no_chunk_makes_room_for_one_that_waits() -> None:
    server = Waiting()
    fetches = server.fetches()
    for peer in range(MAX_FETCHING):
        fetches.ask(peer, FETCH)
        server.now += 0.1
    server.now = 61.0
    fetches.serve()
    assert server.failed == []  # no other peer waits
    fetches.ask(98, FETCH)
    fetches.ask(99, FETCH)
    assert (server.failed, server.given[-2:]) == ([0, 1], [98, 99])
    server.now = 60.2
    fetches.ask(100, FETCH)
    assert server.given[-1] == 99


class Deaf:
    """A transport whose peer takes nothing."""

    wire_bytes_sent = wire_bytes_received = 0
    has_unsent = False

    def send(self, _: object) -> int:
        raise BlockingIOError


def send_without_end(peer: Peer[Any], size: int) -> None:
    for _ in range(2000):
        peer.send(StatusReply(), [bytes(size)])


def test_frames_queued_for_a_peer_are_bounded_in_bytes() -> None:
    limits = Limits(queued_bytes=8 * 2**20)
    for size, most in ((2**20, 9), (2**24, limits.queued_large_buffers), (2**10, 1024)):
        peer: Peer[Any] = Peer(1, Deaf(), FrameReader(StatusReply, limits), limits, 0.0)  # type: ignore[arg-type]
        with pytest.raises(BadFrame):
            send_without_end(peer, size)
        assert peer.num_waiting <= most


def test_peer_with_the_longest_queue_is_dropped_over_the_total_limit() -> None:
    server = object.__new__(Server)
    server._limits = Limits(queued_bytes_in_all=10 * 2**20)
    sizes = {1: 0, 2: 7, 3: 2, 4: 6, 5: 1}
    peers: Any = {n: SimpleNamespace(excess_bytes=size * 2**20, large_buffers={}) for n, size in sizes.items()}
    server._peers = peers
    left: list[int] = []
    server.fail = lambda peer, error: left.append(peer)  # type: ignore[method-assign]
    server._relieve()
    assert left == [2]
    assert Limits().queued_bytes_in_all < Limits().connections * Limits().queued_bytes


def dropped(weights: Any, room: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the peers that are disconnected if these large buffers wait for them, and `room` bytes are left."""
    numbers: list[int] = []

    def usable_memory() -> tuple[int, int]:
        return 100, room

    server = object.__new__(Server)
    server._peers = {number: SimpleNamespace(large_buffers=held) for number, held in weights.items()}  # type: ignore[misc]
    server.fail = lambda peer, error: numbers.append(peer)  # type: ignore[method-assign]
    monkeypatch.setattr("evener.wire.server.usable_memory", usable_memory)
    server._relieve_memory()
    return numbers


@pytest.mark.parametrize(("room", "expected"), [(8, []), (7, [3]), (0, [3, 2])])
def test_peers_that_alone_hold_most_memory_are_dropped_before_it_ends(
    room: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: Any = {1: {100: 3}, 2: {100: 3, 101: 2, 103: 3}, 3: {100: 3, 101: 2, 102: 4}, 4: {}}
    assert dropped(weights, room, monkeypatch) == expected


def test_peers_that_share_the_present_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {number: {100: 3} for number in range(5)}
    assert dropped(present, 0, monkeypatch) == []
    assert dropped({**present, 5: {101: 3}, 6: {102: 3}}, 4, monkeypatch) == [5]


def test_buffer_that_is_almost_sent_counts_whole() -> None:
    class Slow(Deaf):
        def send(self, views: Any) -> int:
            return sum(map(len, views)) - 1

    limits = Limits()
    peer: Peer[Any] = Peer(1, Slow(), FrameReader(StatusReply, limits), limits, 0.0)  # type: ignore[arg-type]
    peer.send(StatusReply(), [bytes(2**22)])
    assert list(peer.large_buffers.values()) == [2**22]


def test_large_frame_head_leaves_no_memory_allocated() -> None:
    from evener.wire.frame import encode_head
    from evener.wire.reader import READ_AHEAD

    reader: FrameReader[Any] = FrameReader(Phase, Limits())
    data = encode_head(0, msgspec.msgpack.encode(Phase(what="x" * 50_000)))
    rest = memoryview(data)
    frame = None
    while rest:
        count = min(len(reader.space), len(rest))
        reader.space[:count] = rest[:count]
        frame, rest = reader.feed(count), rest[count:]
    assert frame is not None
    assert len(reader._near) == READ_AHEAD


def test_oversized_profile_is_rejected_and_measured_ones_fit() -> None:
    require_small(None)
    require_small(LARGE_PROFILE)
    assert len(msgspec.msgpack.encode(LARGE_PROFILE)) < MAX_PROFILE_BYTES
    with pytest.raises(BadFrame):
        require_small(replace(LARGE_PROFILE, throughputs=LARGE_PROFILE.throughputs * 2))
    with plane() as ps, stranger(ps) as connection:
        connection.send(
            replace(introduction("a"), profile=replace(LARGE_PROFILE, throughputs=LARGE_PROFILE.throughputs * 2))
        )
        told_until_closed(connection)
        wait_until(lambda: refusals(ps), "that it is refused")


def test_checkpoint_may_not_exceed_its_share_of_the_free_disk(tmp_path: Path) -> None:
    writer = StreamWriter("0" * 64, tmp_path, share=0.0)
    with pytest.raises(InvalidInput):
        writer.add(b"1")
    writer.close()


def test_memory_of_paused_runs_is_bounded() -> None:
    with plane() as ps, ps.control() as control:
        options = {f"{number}": "x" * 4000 for number in range(MAX_JOBS_BYTES // 12_000)}
        resting = replace(job(SYNC, run="rest"), nodes=(), options=options)
        taken = [control.submit(resting, weights(), []) for _ in range(2)]
        with pytest.raises(InvalidInput):
            control.submit(resting, weights(), [])
        assert [run.run for run in ps.ask().runs] == taken


def test_run_that_does_not_fit_into_the_memory_beside_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = weights().layout.num_bytes
    monkeypatch.setattr("evener.ps.master.scheduler.usable_memory", lambda: (64 * size, 6 * size))
    with plane() as ps, ps.control() as control:
        resting = replace(job(SYNC, run="rest"), nodes=())
        momentum = replace(SYNC, outer=replace(SYNC.outer, momentum=0.9))
        control.submit(replace(resting, agreement=momentum), weights(), [])  # weights, momentum, one contribution
        with refused(InvalidInput):
            control.submit(resting, weights(), [])
        assert len(ps.ask().runs) == 1


def test_watching_a_run_repeatedly_does_not_grow_its_log() -> None:
    with plane("a") as ps, ps.control() as control:
        ps.nodes[0].mood.gate.clear()
        run = control.submit(job(SYNC, epochs=4), weights(), [])
        control.follow([run])
        log = ps.home.runs / run / "events.jsonl"
        before = log.stat().st_size
        for _ in range(100):
            control.follow([run])
        assert log.stat().st_size < before + 5000
        ps.nodes[0].mood.gate.set()
