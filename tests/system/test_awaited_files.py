"""A process that opens a file that has not arrived waits for it; one that lists files or reads their sizes does not."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.records.errors import MissingFile
from evener.system.awaited_files import (
    Wanted,
    announce_files,
    await_files,
    await_no_files,
    complete_file,
    complete_folder,
    opened_at_once,
    prefetch_files,
    wanted_file,
)

SIZES = {"a.bin": 8, "sub/b.bin": 8, "empty": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    coming = tmp_path / "data"
    coming.mkdir()
    assert announce_files(coming, SIZES.items())
    yield coming
    await_no_files(coming)


def arrive(folder: Path, path: str, content: bytes = b"contents") -> None:
    with opened_at_once():
        (folder / path).write_bytes(content)
    complete_file(folder, path)


def later(action: Callable[..., object], *arguments: Any) -> threading.Thread:
    thread = threading.Timer(0.2, action, arguments)
    thread.start()
    return thread


def read_by_bytes(path: Path) -> bytes:
    with open(os.fsencode(path), "rb") as file:
        return file.read()


READERS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: path.read_bytes(),
    "descriptor": lambda path: os.read(os.open(path, os.O_RDONLY), 8),
    "NumPy": lambda path: np.fromfile(path, np.uint8).tobytes(),
    "map": lambda path: bytes(np.memmap(path, np.uint8)),
    "bytes of a path": read_by_bytes,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", ["a.bin", "sub/b.bin", "sub/../sub/b.bin"])
def test_opening_waits_for_the_whole_file(reader: str, path: str, folder: Path) -> None:
    await_files(folder)
    began = time.monotonic()
    thread = later(arrive, folder, path)
    assert READERS[reader](folder / path) == b"contents"
    assert time.monotonic() - began > 0.15
    thread.join()
    assert set(Wanted(folder).new()) == {os.path.normpath(path)}


def test_other_readers_wait_as_well(folder: Path) -> None:
    await_files(folder)
    thread = later(arrive, folder, "a.bin", gzip.compress(b"contents"))
    with gzip.open(folder / "a.bin") as file:
        assert file.read() == b"contents"
    thread.join()
    thread = later(arrive, folder, "sub/b.bin", b"")
    sqlite3.connect(folder / "sub" / "b.bin").close()
    thread.join()


def test_looking_waits_for_nothing(folder: Path) -> None:
    await_files(folder)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert files == SIZES
    assert (folder / "empty").read_bytes() == b""
    assert list(Wanted(folder).new()) == []
    with pytest.raises(FileNotFoundError):
        (folder / "none").read_bytes()
    (folder / "cache").write_bytes(b"made here")
    assert (folder / "cache").read_bytes() == b"made here"


def test_relative_paths_and_links_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder, target_is_directory=True)
    await_files(link)
    monkeypatch.chdir(folder)
    thread = later(arrive, folder, "a.bin")
    assert Path("a.bin").read_bytes() == b"contents"
    thread.join()
    thread = later(arrive, folder, "sub/b.bin")
    assert (link / "sub" / "b.bin").read_bytes() == b"contents"
    thread.join()
    await_no_files(link)


def test_nothing_waits_after_the_end(folder: Path) -> None:
    await_files(folder)
    await_no_files(folder)
    assert (folder / "a.bin").read_bytes() == bytes(8)


def read_in_process(folder: Path, answer: Any) -> None:
    answer.send((folder / "a.bin").read_bytes())


def test_forked_process_waits(folder: Path) -> None:
    await_files(folder)
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=read_in_process, args=(folder, there))
    process.start()
    arrive(folder, "a.bin")
    assert here.recv() == b"contents"
    process.join()


def test_process_without_a_fork_waits(folder: Path) -> None:
    await_files(folder)
    code = (
        "from evener.system.awaited_files import await_files_in_process; await_files_in_process(); import sys;"
        "print('begun', flush=True); print(open(sys.argv[1]).read())"
    )
    command = [sys.executable, "-c", code, str(folder / "a.bin")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.2)
        assert process.poll() is None
        arrive(folder, "a.bin")
        assert process.stdout.read() == "contents\n"


def test_wait_ends_with_an_error_if_the_run_is_over_or_the_folder_is_gone(folder: Path, tmp_path: Path) -> None:
    def over() -> None:
        raise InterruptedError

    await_files(folder, over)
    with pytest.raises(InterruptedError):
        (folder / "a.bin").read_bytes()
    await_no_files(folder)
    await_files(folder)
    thread = later(folder.rename, tmp_path / "elsewhere")
    with pytest.raises(MissingFile):
        (folder / "a.bin").read_bytes()
    thread.join()


def test_files_of_several_samples_are_requested_together(folder: Path) -> None:
    await_files(folder)
    opened: list[int] = []
    files = [folder / "a.bin", folder / "sub" / "b.bin"]

    def read(sample: int) -> bytes:
        opened.append(sample)
        return files[sample].read_bytes()

    wanted = Wanted(folder)
    thread = threading.Thread(target=prefetch_files, args=(read, [0, 1]))
    thread.start()
    while opened != [0, 1]:
        time.sleep(0.01)
    time.sleep(0.1)
    assert sorted(set(wanted.new())) == ["a.bin", "sub/b.bin"]
    for path in ("a.bin", "sub/b.bin"):
        arrive(folder, path)
    thread.join()
    complete_folder(folder)
    opened.clear()
    prefetch_files(read, [0, 1])  # all are there: nothing is read ahead
    assert opened == []


def test_sample_that_cannot_be_read_is_no_error_ahead(folder: Path) -> None:
    await_files(folder)

    def read(_: int) -> None:
        raise ValueError

    prefetch_files(read, [0])


def test_prefetch_in_one_thread_lets_others_wait(folder: Path) -> None:
    await_files(folder)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append((folder / "sub" / "b.bin").read_bytes()))

    def read(_: int) -> bytes:
        if not thread.is_alive() and not found:
            thread.start()
            time.sleep(0.1)
        return (folder / "a.bin").read_bytes()

    ends = [later(arrive, folder, path) for path in ("a.bin", "sub/b.bin")]
    prefetch_files(read, [0])
    for one in (thread, *ends):
        one.join()
    assert found == [b"contents"]


def test_system_without_marks_of_files_reads_nothing_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.system.awaited_files._COMING", 0o600)
    assert not announce_files(tmp_path, SIZES.items())
    assert not wanted_file(tmp_path).exists()
    assert list(tmp_path.iterdir()) == []


def test_executable_files_of_the_user_are_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"contents")
    (tmp_path / "run.sh").chmod(0o755)
    await_files(tmp_path)
    assert (tmp_path / "run.sh").read_bytes() == b"contents"
    await_no_files(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o600])
def test_file_system_with_fixed_marks_reads_nothing_early(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    monkeypatch.setattr("evener.system.awaited_files._COMPLETE", mode)
    assert not announce_files(tmp_path, SIZES.items())
    assert list(tmp_path.iterdir()) == []


def test_name_with_a_carriage_return_is_requested_whole(folder: Path) -> None:
    wanted_file(folder).write_bytes(b"Icon\r\na.bin\n")
    assert list(Wanted(folder).new()) == ["Icon\r", "a.bin"]


def test_hook_is_installed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await_files(folder)
    monkeypatch.setattr(sys, "addaudithook", pytest.fail)
    for _ in range(3):
        await_no_files(folder)
        await_files(folder)


def test_transfer_that_ends_before_a_file_is_complete_is_an_error(folder: Path) -> None:
    await_files(folder)
    thread = later(complete_folder, folder)
    with pytest.raises(MissingFile):
        (folder / "a.bin").read_bytes()
    thread.join()
    with pytest.raises(MissingFile):
        (folder / "sub" / "b.bin").read_bytes()
