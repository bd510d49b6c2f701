"""Nothing grows with what somebody says: files, names, events, answers that nobody takes."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from evener.ps.master import run_journal
from evener.ps.master.access.quotas import MAX_ARRIVING_BYTES, MAX_FETCHES, MAX_NAMES, connection_limits
from evener.ps.master.node_state import NodeState
from evener.ps.master.nodes import Nodes
from evener.ps.protocol import blob_stream
from evener.ps.protocol import job as protocol_job
from evener.ps.protocol import messages as m
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
from evener.ps.protocol.directions import ToCommand, ToNode
from evener.ps.protocol.examination_messages import MAX_REPORT_BYTES, Examined, ExamineNodes, TaskQuestion
from evener.ps.protocol.job import Submissions, encode_job
from evener.records import history as records_history
from evener.records.errors import InvalidFile
from evener.records.history import History
from evener.records.record import Validation
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import CannotJoin, ConnectionLost, MasterFull
from evener.wire.frame import encode_head
from evener.wire.identity import Role
from evener.wire.limits import Limits
from support.agreements import SYNC
from support.linear_engine import job, weights
from support.master_in_threads import Plane, plane, wait_until
from support.refusals import refused
from support.run_stage import Stage
from support.strangers import Sent, introduction, joined, refusals, stranger, told_until_closed, welcomed


@pytest.fixture
def few_files() -> Iterator[int]:
    """A limit of open files that connections would soon reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def as_many_as_may(ps: Plane, most: int) -> Iterator[Connection[m.Header]]:
    """Connections until there can be no more."""
    for _ in range(most):
        try:
            yield stranger(ps)
        except (CannotJoin, OSError):
            return


@pytest.mark.slow
def test_connection_limit_leaves_file_descriptors_for_the_master(few_files: int) -> None:
    limits = connection_limits(15.0)
    assert limits.connections + limits.pending + 128 <= few_files
    with plane("a", patience=5) as ps:
        idle = list(as_many_as_may(ps, few_files))
        assert len(idle) < few_files
        assert len(idle) >= limits.connections // 2
        for connection in idle[: len(idle) // 2]:  # of both ends, which are in one process here
            connection.close()
        idle = idle[len(idle) // 2 :]
        ps.run(job(SYNC), weights())
        for connection in idle:
            connection.close()


def test_peer_with_too_many_fetches_is_disconnected() -> None:
    with plane("a", patience=2) as ps:
        stream = bytes(4 * 2**20)
        digest = hashlib.sha256(stream).hexdigest()
        ps.home.blobs.mkdir()
        (ps.home.blobs / digest).write_bytes(stream)
        with stranger(ps) as evil:
            welcomed(evil)  # who has not joined is refused for that, whatever it asks for
            with contextlib.suppress(ConnectionLost):  # closed while it still asks
                for _ in range(1000):
                    evil.send(m.FetchBlob(digest=digest, offset=0))
            wait_until(lambda: refusals(ps))
        assert [line["name"] for line in refusals(ps)] == ["evil"]
        assert MAX_FETCHES <= 16
        ps.run(job(SYNC), weights())


def test_silent_connection_is_closed_but_a_watching_one_stays() -> None:
    with plane("a", patience=0.3) as ps:
        ps.nodes[0].mood.seconds = 0.1
        results: list[Any] = []
        running = threading.Thread(target=lambda: results.append(ps.watch(job(SYNC, epochs=6), weights())))
        running.start()
        with stranger(ps) as idle:
            began = time.monotonic()
            told_until_closed(idle)
        assert 0.9 < time.monotonic() - began < 10
        running.join()
        assert results[0][0].error is None


def test_heartbeats_before_joining_do_not_keep_a_connection_open() -> None:
    with plane(patience=0.3) as ps:
        connection: Connection[m.Header] = open_connection(
            ps.address, ps.identity.token_of("node"), ToNode, Limits(patience=5)
        )
        began = time.monotonic()
        with connection, contextlib.suppress(ConnectionLost):
            while time.monotonic() - began < 10:
                connection.send(m.Heartbeat())
                time.sleep(0.05)
        assert 0.9 < time.monotonic() - began < 10


def test_nodes_and_submitters_leave_room_for_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Limits(connections=32, pending=8, patience=5)
    monkeypatch.setattr("evener.ps.master.master.connection_limits", lambda _: few)
    with plane(patience=5) as ps, contextlib.ExitStack() as opened:
        most: dict[Role, int] = {"node": 28, "submitter": 30, "admin": 32}
        for role, many in most.items():
            with contextlib.suppress(MasterFull):
                for _ in range(few.connections + 1):
                    opened.enter_context(open_connection(ps.address, ps.identity.token_of(role), ToNode, few))
            assert len(ps.master.server.peers) == many


def test_names_of_departed_nodes_are_dropped_beyond_the_limit() -> None:
    nodes = Nodes(15.0)
    for number in range(MAX_NAMES):
        record = nodes.record(f"n{number}")
        presence = "present" if number < 2 else "left"
        record.state = NodeState(incarnation=1, presence=presence, heard=0.0, member_since=0.0, until=0.0)  # type: ignore[arg-type]
    nodes.connect(nodes.record("n0"), 7)
    assert nodes.has_room("n5", 1.0)
    assert len(nodes.by_name) == MAX_NAMES
    assert nodes.has_room("another", 1.0)
    assert list(nodes.by_name) == ["n0", "n1"]


def test_node_that_joins_under_too_many_names_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.ps.master import nodes

    monkeypatch.setattr(nodes, "MAX_NAMES", 3)
    with plane("a", patience=1) as ps:
        evil = [stranger(ps) for _ in range(3)]
        for number, connection in enumerate(evil):
            joined(connection, name=f"evil-{number}")
        told = told_until_closed(evil[-1])
        assert "the limit" in next(header.reason for header in told if isinstance(header, m.Dismiss))
        for connection in evil:
            connection.close()


def half_a_message(connection: Connection[m.Header], header: m.Header, num_bytes: int) -> None:
    """Send the head of a message, and the first bytes of its buffer."""
    head = encode_head(0, msgspec.msgpack.encode(header), [num_bytes])
    connection._transport.sock.sendall(head + b"x" * 8)


def submitter_of(ps: Plane, patience: float = 5.0) -> Connection[m.Header]:
    return open_connection(ps.address, ps.identity.token_of("submitter"), ToNode | ToCommand, Limits(patience=patience))


def begin_to_submit(connection: Connection[m.Header]) -> None:
    """Submit a run whose code never comes."""
    connection.send(m.SubmitRun(), [encode_job(replace(job(SYNC), code="b" * 64)), weights().memory])
    while not isinstance(connection.receive().header, m.FetchBlob):
        pass


def test_admin_submits_although_a_submitter_never_sends_its_code() -> None:
    with plane("a") as ps, submitter_of(ps) as evil, submitter_of(ps) as other:
        begin_to_submit(evil)
        other.send(m.SubmitRun(), [encode_job(job(SYNC, run="other")), weights().memory])
        told = next(
            header for header in iter(lambda: other.receive().header, None) if isinstance(header, m.RunRejected)
        )
        assert told.reason == "submitter is submitting a run: try again"
        ps.run(job(SYNC), weights())
        told_until_closed(evil)


def test_submission_whose_code_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_job, "MAX_PAUSE_S", 1.2)
    with plane(patience=0.3) as ps, submitter_of(ps) as evil:
        begin_to_submit(evil)
        began = time.monotonic()
        with contextlib.suppress(ConnectionLost):
            while True:
                evil.receive()  # heartbeats of the master, which it answers
                evil.send(m.GetStatus())
        assert 0.9 < time.monotonic() - began < 10


def test_half_messages_of_nodes_that_have_not_joined_take_no_memory() -> None:
    with plane() as ps, contextlib.ExitStack() as opened:
        for _ in range(8):
            evil: Connection[m.Header] = opened.enter_context(
                open_connection(ps.address, ps.identity.token_of("node"), ToNode, Limits(patience=5))
            )
            half_a_message(evil, Examined(number=1, clock=0.0), MAX_REPORT_BYTES)
        with ps.control() as control:
            assert [node.name for node in control.examine(0.5).nodes] == ["master"]
        assert ps.master._handlers._arrivals._bytes["node"] == {}


def test_half_messages_of_submitters_do_not_disturb_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    question = TaskQuestion(task="digits", code="c" * 64)
    monkeypatch.setitem(MAX_ARRIVING_BYTES, "submitter", 4096)
    with plane() as ps, contextlib.ExitStack() as opened:
        for number in range(8):
            evil: Connection[m.Header] = opened.enter_context(
                open_connection(ps.address, ps.identity.token_of("submitter"), ToNode, Limits(patience=5))
            )
            head = encode_head(0, msgspec.msgpack.encode(ExamineNodes(seconds=0.5)), [1024, 1024])
            evil._transport.sock.sendall(head + b"x")
            wait_until(lambda: len(ps.master._handlers._arrivals._bytes["submitter"]) == min(number + 1, 2))  # noqa: B023
        with ps.control() as control:
            assert [node.name for node in control.examine(0.5, question, b"x").nodes] == ["master"]
        assert [line["detail"] for line in refusals(ps)] == [
            "its message arrives too slowly, and messages of other peers need the memory"
        ] * 6


def test_number_of_events_of_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_journal, "MAX_EVENTS", 3)
    stage = Stage(SYNC)
    for _ in range(100):
        stage.run.note("away", "again")
    history: History = stage.run.journal.history
    assert [event.kind for event in history.events] == ["away", "away", "away", "more events"]
    assert len(stage.run.journal.events) == 4


def test_number_of_validations_of_a_run_is_bounded_and_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_history, "_CAPACITY", 8)
    stage = Stage(SYNC)
    for epoch in range(100):
        stage.run.journal.validated(Validation(step=epoch, epoch=epoch, loss=1.0, accuracy=epoch == 33, seconds=1.0))
    history: History = stage.run.journal.history
    assert {33, 99} <= {one.epoch for one in history.validations}
    assert max(len(history.validations), len(history.epochs)) < 8
    assert [event.kind for event in history.events] == ["more validations"]


def test_archive_of_100_000_empty_files_creates_none_on_the_master(tmp_path: Path) -> None:
    listing = msgspec.msgpack.encode([(f"{number:x}", 0) for number in range(100_000)])
    stream = struct.pack("<QQ", len(listing), 0) + listing
    digest, sent = hashlib.sha256(stream).hexdigest(), Sent()
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(1, [memoryview(encode_job(replace(job(SYNC), code=digest))), weights().memory.data])
    began = time.process_time()
    submissions.chunk(1, m.BlobChunk(digest=digest, offset=0, total=len(stream)), memoryview(stream))
    assert time.process_time() - began < 0.2
    wait_until(submissions.tick)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [digest]
    assert BlobStream(tmp_path / "blobs" / digest, digest).read(0, 8) == stream[:8]


def test_blob_that_would_fill_the_disk_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_stream, "MIN_FREE_SHARE", 1.0)
    writer = StreamWriter("0" * 64, tmp_path)
    with refused(InvalidFile):
        writer.add(b"1")
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_profile_carries_the_name_of_its_node() -> None:
    with plane() as ps, stranger(ps) as connection:
        connection.send(introduction("evil"))
        profile = introduction("somebody else", profiled=True).profile
        assert profile is not None
        connection.send(m.Profiled(profile=profile))
        wait_until(lambda: (node := ps.master.nodes.by_name.get("evil")) is not None and node.profile is not None)
        found = ps.master.nodes.by_name["evil"].profile
        assert found is not None
        assert found.node == "evil"
        connection.send(m.Leave())
