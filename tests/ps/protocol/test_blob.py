"""Blobs arrive whole, as they were sent, in their own folder; or not at all."""

from __future__ import annotations

import hashlib
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.ps.protocol import blob as blob_module
from evener.ps.protocol.blob import Blob, BlobWriter, blob_folder, whole_folder
from evener.ps.protocol.blob_stream import BlobStream
from evener.records.errors import EvenerError, InvalidFile, InvalidInput, InvalidValue, MissingFile
from support.refusals import refused

FILES = {"a.bin": b"0123456789", "empty": b"", "sub/b.bin": bytes(range(256)) * 20, "sub/last": b""}


def packed(folder: Path, files: dict[str, bytes]) -> Blob:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return Blob(folder, list(files))


def read_back(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in whole_folder(folder)}


@given(sizes=st.lists(st.integers(1, 700), min_size=1))
def test_files_arrive_unchanged_in_any_chunks(tmp_path_factory: Any, sizes: list[int]) -> None:
    folder: Path = tmp_path_factory.mktemp("blob")
    blob = packed(folder / "from", FILES)
    arrival = BlobWriter(blob.digest, folder / "to")
    turn = 0
    while arrival.received < blob.num_bytes:
        arrival.add(blob.read(arrival.received, sizes[turn % len(sizes)]))
        turn += 1
    assert read_back(arrival.finish()) == FILES
    arrival.close()
    assert [path.name for path in (folder / "to").iterdir()] == [blob.digest]


def test_digest_depends_on_contents_and_paths(tmp_path: Path) -> None:
    digests = {packed(tmp_path / str(i), files).digest for i, files in enumerate((FILES, {"a": b"1"}, {"b": b"1"}))}
    assert len(digests) == 3
    assert packed(tmp_path / "again", FILES).digest in digests


def test_damaged_transfer_is_rejected_and_leaves_no_files(tmp_path: Path) -> None:
    blob = packed(tmp_path / "from", FILES)
    stream = bytearray(blob.read(0, blob.num_bytes))
    stream[-700] ^= 1
    for data in (bytes(stream), bytes(stream[:-1])):
        arrival = BlobWriter(blob.digest, tmp_path / "to")
        arrival.add(data)
        with refused(InvalidFile):
            arrival.finish()
        arrival.close()
    assert list((tmp_path / "to").iterdir()) == []


def stream_of(listing: bytes) -> bytes:
    return struct.pack("<Q", len(listing)) + listing


def test_master_reads_no_long_list_of_files(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    path.write_bytes(stream_of(msgspec.msgpack.encode([("a", 0)] * 250_000)))
    began = time.process_time()
    with refused(InvalidFile):
        BlobStream(path, "d" * 64).file("model.safetensors", 10)
    assert time.process_time() - began < 0.1


def test_node_decodes_no_list_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_module, "_MAX_FILES", 20)
    for count, fits in ((20, True), (21, False), (70_000, False)):
        arrival = BlobWriter("d" * 64, tmp_path / "to")
        stream = stream_of(msgspec.msgpack.encode([(f"{number:x}", 0) for number in range(count)]))
        if fits:
            arrival.add(stream)
        else:
            with refused(InvalidFile):
                arrival.add(stream)
        arrival.close()
    with refused(InvalidValue):
        Blob(tmp_path, ["a"] * 21)


@pytest.mark.parametrize("path", ["", ".", "./.", "/", "/a", "..", "a/../b", "a/..", "a\\b", "c:a", "a\0b"])
def test_path_out_of_the_folder_is_rejected(path: str) -> None:
    assert not blob_module._is_safe(path)


@pytest.mark.parametrize("path", ["a", "a/b.c", "./a", "a//b", "..a", "a..", "é/ü"])
def test_path_inside_of_the_folder_is_accepted(path: str) -> None:
    assert blob_module._is_safe(path)


def test_file_that_became_shorter_raises_missing_file(tmp_path: Path) -> None:
    blob = packed(tmp_path, FILES)
    (tmp_path / "a.bin").write_bytes(b"01")
    with refused(MissingFile):
        blob.read(0, blob.num_bytes)


def test_second_transfer_of_a_blob_is_harmless(tmp_path: Path) -> None:
    blob = packed(tmp_path / "from", FILES)
    for _ in range(2):
        arrival = BlobWriter(blob.digest, tmp_path / "to")
        arrival.add(blob.read(0, blob.num_bytes))
        assert read_back(arrival.finish()) == FILES
        arrival.close()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "a\\b", "c:out", "a\0b"])
def test_no_file_is_written_outside_the_blob_folder(tmp_path: Path, path: str) -> None:
    with refused(InvalidValue):
        receive(tmp_path, [(path, 1)], b"x")


@pytest.mark.parametrize(
    ("files", "contents", "sentence"),
    [
        ([("a", 1)], b"xy", "is longer than its list of files says"),
        ([("a", -1)], b"", "must be inside"),
        ("no list", b"", "has no list of files"),
        ([("a", 1), ("a", 1)], b"xy", "File exists"),
    ],
    ids=["longer", "negative", "no list", "twice the same"],
)
def test_invalid_blob_streams_are_rejected(tmp_path: Path, files: Any, contents: bytes, sentence: str) -> None:
    with pytest.raises((EvenerError, FileExistsError), match=sentence):
        receive(tmp_path, files, contents)
    assert list(tmp_path.iterdir()) == []


def test_oversized_file_list_is_rejected_before_it_is_stored(tmp_path: Path) -> None:
    arrival = BlobWriter("0" * 64, tmp_path)
    with refused(InvalidFile):
        arrival.add(struct.pack("<Q", 2**40))
    arrival.close()


def test_invalid_digest_is_rejected(tmp_path: Path) -> None:
    for name in ("", "../x", "A" * 64, "0" * 63):
        with refused(InvalidValue):
            blob_folder(tmp_path, name)


def test_folder_with_only_hidden_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"1")
    (tmp_path / ".hidden").write_bytes(b"1")
    with refused(MissingFile):
        whole_folder(tmp_path)


def test_link_out_of_the_folder_is_rejected_by_name(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "file").write_bytes(b"1")
    (inside / "within").symlink_to(inside / "file")
    assert sorted(whole_folder(inside)) == ["file", "within"]
    for target in (outside, outside / "file"):
        (inside / "way-out").symlink_to(target)
        with refused(InvalidInput):
            whole_folder(inside)
        (inside / "way-out").unlink()


def receive(folder: Path, files: Any, contents: bytes) -> None:
    """Receive a stream with this list and these contents, under its true name."""
    listing = msgspec.msgpack.encode(files)
    stream = struct.pack("<Q", len(listing)) + listing + contents
    arrival = BlobWriter(hashlib.sha256(stream).hexdigest(), folder)
    try:
        arrival.add(stream)
        arrival.finish()
    finally:
        arrival.close()
