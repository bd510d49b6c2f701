"""Copies of a process: made anew where one stands still before its first line."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.frontends.programs import forked_replica, replica_files
from evener.frontends.programs.forked_replica import forked
from evener.frontends.programs.replica_files import discard_writes
from evener.records.errors import InvalidInput, TrainingFailed
from support.refusals import refused


def forks(monkeypatch: pytest.MonkeyPatch, num_stuck: int) -> list[int]:
    """The copies that are made from now on, of which the first ones stand still."""
    made: list[int] = []
    fork = os.fork

    def fork_one() -> int:
        pid = fork()
        if pid:
            made.append(pid)
        elif len(made) < num_stuck:
            time.sleep(600)
        return pid

    monkeypatch.setattr(os, "fork", fork_one)
    monkeypatch.setattr(forked_replica, "_BEGIN_SECONDS", 1)
    return made


@pytest.mark.parametrize("num_stuck", [0, 1])
def test_stuck_replica_is_ended_and_forked_again(monkeypatch: pytest.MonkeyPatch, num_stuck: int) -> None:
    made = forks(monkeypatch, num_stuck)
    if (pid := forked()) == 0:
        os._exit(7)
    assert len(made) == num_stuck + 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for stuck in made[:-1]:
        with pytest.raises(ChildProcessError):
            os.waitpid(stuck, os.WNOHANG)


def test_fork_fails_after_three_stuck_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forks(monkeypatch, 3)
    with refused(TrainingFailed):
        forked()
    assert len(made) == 3


def in_replica(work: Callable[[], object]) -> None:
    """Do `work` in a replica. Raises AssertionError if it raises something."""
    if (pid := forked()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_replica_changes_no_file_outside_its_own_folder(tmp_path: Path) -> None:
    theirs, own = tmp_path / "weights.pt", tmp_path / "own"
    theirs.write_text("kept")
    own.mkdir()
    (own / "mine").touch()

    def change() -> None:
        discard_writes(own)
        torch.save({}, theirs)
        for mode in ("w", "a", "r+"):
            with theirs.open(mode) as file:
                file.write("lost")
        theirs.unlink()
        theirs.rename(own / "stolen")
        os.replace(own / "mine", tmp_path / "final")
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        (tmp_path / "new").touch()
        with tempfile.TemporaryDirectory() as folder:
            assert Path(folder).parent == own
        with theirs.open("r+") as file:
            assert file.read() == "lost"  # in a copy of it
        assert theirs.read_text() == "kept"
        with io.BytesIO() as buffer:
            torch.save({}, buffer)
            assert buffer.tell() > 0
        (own / "result").write_text("written")

    in_replica(change)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["own", "weights.pt"]
    assert theirs.read_text() == "kept"
    assert (own / "result").read_text() == "written"
    assert (own / "mine").exists()


def test_replica_that_writes_in_another_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()

    def write() -> None:
        discard_writes(tmp_path / "own")
        with pytest.raises(InvalidInput):
            os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    in_replica(write)
    assert not (tmp_path / "file").exists()


def test_replica_moves_no_position_of_a_file_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(100)))
    with (tmp_path / "data").open("rb", buffering=0) as data, (tmp_path / "data").open("r+b", buffering=0) as both:
        data.seek(10)
        both.seek(20)

        def read() -> None:
            assert data.read(3) == bytes([10, 11, 12])
            assert both.read(1) == bytes([20])
            both.write(b"lost")
            both.seek(21)
            assert both.read(4) == b"lost"

        in_replica(read)
        assert data.read(1) == bytes([10])
        assert both.read(3) == bytes([20, 21, 22])


def test_replica_writes_nothing_to_a_log_of_its_rank(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:

        def write() -> None:
            log.write("lost")
            log.flush()

        in_replica(write)
        log.write("kept")
    assert (tmp_path / "log").read_text() == "kept"


def test_replica_takes_nothing_from_a_stream_of_its_rank() -> None:
    reading, writing = os.pipe()
    one, other = socket.socketpair()
    with one, other, open(reading, "rb", buffering=0) as stream:
        os.write(writing, b"kept")
        other.sendall(b"kept")

        def read() -> None:
            with pytest.raises(OSError):
                stream.read(4)
            with pytest.raises(OSError):
                one.recv(4)

        in_replica(read)
        assert stream.read(4) == b"kept"
        assert one.recv(4) == b"kept"
        os.close(writing)


_COPY_BYTES = forked_replica._MAX_COPY_BYTES


@pytest.mark.parametrize("largest", [_COPY_BYTES, 4096], ids=["copied", "copied by pages"])
def test_replica_changes_no_memory_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr(forked_replica, "_MAX_COPY_BYTES", largest)
    tensor, counter = torch.ones(1000, dtype=torch.float64), multiprocessing.Value("i", 0)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    mapped: Any = np.memmap(tmp_path / "bank", dtype=np.float64, mode="w+", shape=(1000,))
    removed: Any = np.memmap(tmp_path / "gone", dtype=np.float64, mode="w+", shape=(1000,))
    (tmp_path / "gone").unlink()
    nameless: Any = np.frombuffer(mmap.mmap(-1, 10_000))  # without a file, and so copied in pieces
    banks: list[Any] = [tensor, mapped, removed, nameless]
    view = np.memmap(tmp_path / "bank", dtype=np.float64, mode="r", shape=(1000,))
    for bank in banks:
        bank[:] = 1.0

    def change() -> None:
        for bank in banks:
            assert float(bank[0]) == float(bank[-1]) == 1.0
            bank[:] = 2.0
        assert view[0] == (2.0 if largest > 4096 else 1.0)  # of the same memory, if it is copied
        counter.get_lock().acquire()
        counter.value = 2
        os._exit(0)  # with the lock

    in_replica(change)
    for bank in banks:
        assert float(bank[0]) == float(bank[-1]) == 1.0
    with counter.get_lock():
        assert counter.value == 0


def test_replica_keeps_the_memory_of_a_file_that_was_cut(tmp_path: Path) -> None:
    mapped: Any = np.memmap(tmp_path / "cut", dtype=np.uint8, mode="w+", shape=(8192,))
    mapped[:] = 7
    os.truncate(tmp_path / "cut", 4096)

    def read() -> None:
        assert mapped[0] == mapped[4095] == 7

    in_replica(read)


def test_replica_without_memory_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def usable_memory() -> tuple[int, int]:
        return 2**30, 4096

    monkeypatch.setattr(forked_replica, "usable_memory", usable_memory)
    with mmap.mmap(-1, 4096), refused(TrainingFailed):
        forked()


def test_replica_that_cannot_copy_or_open_its_files_shares_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_nothing(path: Any, flags: int, *arguments: Any) -> int:
        if "/fd/" in str(path) and os.getpid() != rank:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *arguments)

    def fail(_: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rank = os.getpid()
    with (tmp_path / "both").open("w+b", buffering=0) as both, (tmp_path / "data").open("w+b", buffering=0) as data:
        for file in (both, data):
            file.write(b"kept")
            file.seek(0)
        monkeypatch.setattr(replica_files, "_opened_copy", fail)

        def write() -> None:
            assert both.read() == b"kept"
            with pytest.raises(OSError):
                both.write(b"lost")

        in_replica(write)
        monkeypatch.setattr(os, "open", open_nothing)

        def read() -> None:
            with pytest.raises(OSError):
                data.write(b"lost")

        in_replica(read)
        assert both.read() == data.read() == b"kept"


def test_replica_copies_files_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_files, "_MAX_COPIED_BYTES", 100)
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(i)).open("w+b", buffering=0)) for i in range(3)]
        for file in files:
            file.write(bytes(40))

        def write() -> None:
            for file in files[:2]:
                file.write(b"lost")
            with pytest.raises(OSError):
                files[2].write(b"lost")
            files[2].seek(0)
            assert files[2].read() == bytes(40)

        in_replica(write)
        assert [file.read() for file in files] == [b""] * 3


@pytest.mark.slow
def test_slow_copy_of_files_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_replica, "_BEGIN_SECONDS", 0.5)
    copied = replica_files._opened_copy

    def copy_slowly(path: str) -> int:
        time.sleep(1.5)
        return copied(path)

    monkeypatch.setattr(replica_files, "_opened_copy", copy_slowly)
    with (tmp_path / "data").open("w+"):
        in_replica(lambda: None)


def test_replica_has_its_own_connection_to_a_manager() -> None:
    with multiprocessing.get_context("forkserver").Manager() as manager:
        cache = manager.dict({"rank": 1})

        def read() -> None:
            for _ in range(100):
                assert cache["rank"] == 1

        pids = [pid for _ in range(2) if (pid := _reading(read))]
        for _ in range(100):
            assert cache["rank"] == 1
        for pid in pids:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _reading(read: Callable[[], None]) -> int:
    """Let a replica read, without waiting for it."""
    if (pid := forked()) == 0:
        try:
            read()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def rings(entries: int = 4) -> tuple[int, list[mmap.mmap]]:
    """The descriptor of an io_uring, as libuv makes one, and its memory; the test is skipped where there is none."""
    parameters = ctypes.create_string_buffer(120)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(425, entries, parameters)
    if descriptor < 0:
        pytest.skip(f"no io_uring here: {os.strerror(ctypes.get_errno())}")
    offsets = {"rings": 0, "entries": 0x10000000}
    return descriptor, [mmap.mmap(descriptor, mmap.PAGESIZE, offset=offset) for offset in offsets.values()]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has io_uring")
def test_replica_has_the_rings_of_an_io_uring_for_itself() -> None:
    descriptor, memories = rings()
    entries = memories[1]
    before = entries[:8]

    def change() -> None:
        assert entries[:8] == before
        entries[:8] = b"replaced"

    try:
        in_replica(change)
        assert entries[:8] == before
    finally:
        for memory in memories:
            memory.close()
        os.close(descriptor)
