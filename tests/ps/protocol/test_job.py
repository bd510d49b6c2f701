"""Runs are taken in one at a time; whatever is wrong with a submission harms no other."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.ps.protocol.blob import CHUNK_BYTES, Blob
from evener.ps.protocol.job import MAX_PAUSE_S, Submission, Submissions, encode_job
from evener.ps.protocol.messages import BlobChunk, FetchBlob
from support.agreements import SYNC
from support.linear_engine import job, weights
from support.master_in_threads import wait_until
from support.strangers import Sent


def buffers(code: str = "") -> list[memoryview]:
    own = replace(job(SYNC), code=code)
    return [memoryview(encode_job(own)), memoryview(weights().memory.data).cast("B")]


def blob(folder: Path) -> Blob:
    (folder / "code").mkdir()
    (folder / "code" / "task.py").write_text("task = 1\n")
    return Blob(folder / "code", ["task.py"])


def test_run_without_blobs_is_complete_at_once(tmp_path: Path) -> None:
    sent = Sent()
    found = Submissions(tmp_path, sent).submit(3, buffers())
    assert found is not None
    assert (found.peer, found.job.run) == (3, "linear-1")
    assert found.weights is not None
    assert bytes(found.weights.memory) == bytes(weights().memory)
    assert sent == []


def test_run_with_blobs_is_complete_when_the_last_is_on_the_disk(tmp_path: Path) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    assert submissions.submit(3, buffers(own.digest)) is None
    assert isinstance(sent[0][1], FetchBlob)
    piece = BlobChunk(digest=own.digest, offset=0, total=own.num_bytes)
    data = own.read(0, own.num_bytes)
    submissions.chunk(9, piece, memoryview(data))  # of a stranger
    assert submissions.tick() is None
    submissions.chunk(3, piece, memoryview(data))
    found: Submission | None = wait_until(submissions.tick)
    assert found is not None
    assert found.peer == 3
    assert (tmp_path / "blobs" / own.digest).read_bytes() == own.read(0, own.num_bytes)


def test_second_submission_waits_while_the_first_continues(tmp_path: Path) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(3, buffers(own.digest))
    assert submissions.submit(4, buffers()) is None
    assert submissions.submit(5, [memoryview(b"\xc1")]) is None
    assert sent.reasons(4) == ["another command is submitting a run: try again"]
    assert "cannot be understood" in sent.reasons(5)[0]
    data = memoryview(own.read(0, own.num_bytes))
    submissions.chunk(3, BlobChunk(digest=own.digest, offset=0, total=own.num_bytes), data)
    wait_until(submissions.tick)


def test_busy_master_gives_its_reason(tmp_path: Path) -> None:
    sent = Sent()
    assert Submissions(tmp_path, sent, why_not=lambda _: "busy").submit(3, buffers()) is None
    assert sent.reasons(3) == ["busy"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_refusal_names_the_user_who_is_submitting(tmp_path: Path) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(3, buffers(own.digest), "alice")
    submissions.submit(4, buffers(), "bob")
    assert sent.reasons(4) == ["alice is submitting a run: try again"]
    submissions.close()


def test_submission_without_further_pieces_stalls(tmp_path: Path) -> None:
    clock = Clock()
    submissions = Submissions(tmp_path / "blobs", Sent(), clock)
    assert submissions.wants(3, (100, 10 * CHUNK_BYTES))
    for number in range(1, 11):  # a byte now and then is too slow
        assert submissions.stalled() is None
        clock.now += MAX_PAUSE_S / 10 + 0.1
        submissions.arrived(3, number)
        submissions.arrived(4, number * CHUNK_BYTES)
    assert submissions.stalled() == 3
    submissions.arrived(3, 10 + CHUNK_BYTES)
    assert submissions.stalled() is None
    submissions.disconnected(3)
    clock.now += MAX_PAUSE_S + 1.0
    assert submissions.stalled() is None


def test_slow_line_is_no_stall_but_blobs_that_trickle_or_repeat_are(tmp_path: Path) -> None:
    clock = Clock()
    submissions = Submissions(tmp_path / "blobs", Sent(), clock)
    (tmp_path / "large").write_bytes(bytes(11 * CHUNK_BYTES))
    large = Blob(tmp_path, ["large"])
    assert submissions.submit(4, buffers(large.digest)) is None
    piece = memoryview(bytes(CHUNK_BYTES))
    for number in range(10):
        clock.now += CHUNK_BYTES / 12_500  # 100 kbit/s
        assert submissions.stalled() is None
        offset = number * CHUNK_BYTES
        data = memoryview(large.read(offset, CHUNK_BYTES))
        submissions.chunk(4, BlobChunk(digest=large.digest, offset=offset, total=large.num_bytes), data)
    for number in range(10):
        clock.now += MAX_PAUSE_S / 10 + 0.1
        offset = 10 * CHUNK_BYTES + number
        submissions.chunk(4, BlobChunk(digest=large.digest, offset=offset, total=large.num_bytes), piece[:1])
    assert submissions.stalled() == 4
    submissions.chunk(4, BlobChunk(digest=large.digest, offset=0, total=large.num_bytes), piece)
    submissions.chunk(4, BlobChunk(digest="c" * 64, offset=10 * CHUNK_BYTES + 10, total=2**30), piece)
    assert submissions.stalled() == 4  # rejected pieces do not count
    submissions.close()


def test_admin_displaces_a_submitter_but_no_admin(tmp_path: Path) -> None:
    submissions = Submissions(tmp_path / "blobs", Sent())
    assert submissions.displace() is None
    assert submissions.wants(3, (100,), "alice")
    assert submissions.num_bytes == 0
    assert submissions.displace() == 3
    assert submissions.wants(4, (100, 50), "admin", is_admin=True)
    assert submissions.num_bytes == 50
    assert submissions.displace() is None
    assert submissions.is_of(4)


def test_damaged_blob_ends_its_submission_and_frees_the_slot(tmp_path: Path) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(3, buffers(own.digest))
    data = bytes(own.num_bytes)
    submissions.chunk(3, BlobChunk(digest=own.digest, offset=0, total=own.num_bytes), memoryview(data))
    assert submissions.tick() is None
    assert len(sent.reasons(3)) == 1
    assert submissions.submit(4, buffers()) is not None


def test_disconnected_command_frees_the_slot(tmp_path: Path) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(3, buffers(own.digest))
    submissions.disconnected(99)
    assert submissions.submit(4, buffers()) is None
    submissions.disconnected(3)
    assert submissions.submit(4, buffers()) is not None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Disk:
    """A disk that is as slow as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_asked, self.answers = threading.Event(), threading.Event()
        self.effect: Callable[[], None] = lambda: None
        monkeypatch.setattr("os.fsync", self._sync)

    def _sync(self, _: int) -> None:
        self.is_asked.set()
        assert self.answers.wait(10.0)
        self.effect()


def of_blob(own: Blob) -> tuple[BlobChunk, memoryview]:
    data = own.read(0, own.num_bytes)
    return BlobChunk(digest=own.digest, offset=0, total=own.num_bytes), memoryview(data)


def test_master_does_not_wait_for_the_disk_of_submitted_data(tmp_path: Path, disk: Disk) -> None:
    clock, sent, own = Clock(), Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent, clock)
    submissions.submit(3, buffers(own.digest))
    submissions.chunk(3, *of_blob(own))
    assert disk.is_asked.wait(10.0)
    clock.now += 2 * MAX_PAUSE_S
    assert submissions.tick() is None
    assert submissions.stalled() is None
    submissions.chunk(3, BlobChunk(digest=own.digest, offset=own.num_bytes, total=2**30), memoryview(b"more"))
    assert not (tmp_path / "blobs" / own.digest).exists()
    disk.answers.set()
    wait_until(submissions.tick)
    assert (tmp_path / "blobs" / own.digest).read_bytes() == own.read(0, own.num_bytes)


def test_command_that_leaves_while_its_data_are_synced_frees_the_slot(tmp_path: Path, disk: Disk) -> None:
    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    submissions.submit(3, buffers(own.digest))
    submissions.chunk(3, *of_blob(own))
    assert disk.is_asked.wait(10.0)
    submissions.disconnected(3)
    assert submissions.submit(4, buffers()) is not None
    submissions.submit(5, buffers(own.digest))
    disk.answers.set()
    submissions.chunk(5, *of_blob(own))
    wait_until(submissions.tick)
    wait_until(lambda: [path.name for path in (tmp_path / "blobs").iterdir()] == [own.digest])


def test_disk_that_fails_rejects_the_run(tmp_path: Path, disk: Disk) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sent, own = Sent(), blob(tmp_path)
    submissions = Submissions(tmp_path / "blobs", sent)
    disk.effect = fail
    disk.answers.set()
    submissions.submit(3, buffers(own.digest))
    submissions.chunk(3, *of_blob(own))
    wait_until(lambda: submissions.tick() is None and bool(sent.reasons(3)))
    assert submissions.submit(4, buffers()) is not None
    assert list((tmp_path / "blobs").iterdir()) == []
