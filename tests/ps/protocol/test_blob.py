"""Blobs arrive whole, as they were sent, in their own folder; or not at all."""

from __future__ import annotations

import hashlib
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.ps.node.blob_writer import BlobWriter
from evener.ps.protocol import blob as blob_module
from evener.ps.protocol.blob import (
    CHUNK_BYTES,
    MIN_PIECE_BYTES,
    Blob,
    blob_folder,
    piece_bytes_of,
    whole_folder,
)
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
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
    stream = StreamWriter(blob.digest, folder / "stream")
    turn = 0
    while stream.received < blob.num_bytes:
        stream.add(blob.read(stream.received, sizes[turn % len(sizes)]))
        turn += 1
    stream.finish()
    arrival = BlobWriter(blob.digest, folder / "to")
    arrival.add_head(stream.put_in_place().read_bytes())
    assert read_back(arrival.finish()) == FILES
    arrival.close()
    assert [path.name for path in (folder / "to").iterdir()] == [blob.digest]


@settings(max_examples=15)
@given(order=st.permutations(range(5)), sizes=st.lists(st.integers(0, 2 * MIN_PIECE_BYTES), min_size=1, max_size=4))
def test_pieces_arrive_in_any_order(tmp_path_factory: Any, order: list[int], sizes: list[int]) -> None:
    folder: Path = tmp_path_factory.mktemp("blob")
    first = 4 * MIN_PIECE_BYTES + 5
    files = {"large": bytes(range(251)) * (first // 251 + 1), **{f"{n}": b"x" * size for n, size in enumerate(sizes)}}
    blob = packed(folder / "from", files)
    arrival = BlobWriter(blob.digest, folder / "to")
    while arrival.missing is None:
        arrival.add_head(blob.read(len(arrival.head.data), 50))
    rest = sorted(arrival.missing - set(order))
    for piece in (*order, *rest, *order):  # a piece that comes again changes nothing
        assert piece not in order or piece not in rest
        arrival.add(piece, blob.read(arrival.head.offset_of(piece), MIN_PIECE_BYTES))
        assert arrival.read(piece) == blob.read(arrival.head.offset_of(piece), MIN_PIECE_BYTES)
    assert read_back(arrival.finish()) == files
    assert arrival.read(0) == blob.read(arrival.head.num_bytes, MIN_PIECE_BYTES)


def test_digest_depends_on_contents_and_paths(tmp_path: Path) -> None:
    digests = {packed(tmp_path / str(i), files).digest for i, files in enumerate((FILES, {"a": b"1"}, {"b": b"1"}))}
    assert len(digests) == 3
    assert packed(tmp_path / "again", FILES).digest in digests


def test_damaged_transfer_is_rejected_and_leaves_no_files(tmp_path: Path) -> None:
    blob = packed(tmp_path / "from", FILES)
    stream = bytearray(blob.read(0, blob.num_bytes))
    stream[-700] ^= 1
    for data in (bytes(stream), bytes(stream[:-1]), bytes(stream[:60]), bytes([*stream[:30], 255, *stream[31:]])):
        for writer in (BlobWriter(blob.digest, tmp_path / "to"), StreamWriter(blob.digest, tmp_path / "to")):
            with refused(InvalidFile):
                writer.add_head(data) if isinstance(writer, BlobWriter) else writer.add(data)
                writer.finish()
            writer.close()
    assert list((tmp_path / "to").iterdir()) == []


def test_damaged_piece_is_rejected_and_may_come_again(tmp_path: Path) -> None:
    blob = packed(tmp_path / "from", {"a": bytes(2 * MIN_PIECE_BYTES)})
    arrival = BlobWriter(blob.digest, tmp_path / "to")
    arrival.add_head(blob.read(0, 1000))
    for wrong in (b"", bytes(MIN_PIECE_BYTES - 1), bytes(MIN_PIECE_BYTES + 1), b"1" + bytes(MIN_PIECE_BYTES - 1)):
        with refused(InvalidFile):
            arrival.add(0, wrong)
    with refused(InvalidFile):
        arrival.finish()
    for piece in (1, 0):
        arrival.add(piece, bytes(MIN_PIECE_BYTES))
    assert read_back(arrival.finish()) == {"a": bytes(2 * MIN_PIECE_BYTES)}


def test_large_blob_has_larger_pieces() -> None:
    sizes = [piece_bytes_of(count) for count in (0, 1, 2**33, 2**33 + 1, 2**36, 2**50)]
    assert sizes == [MIN_PIECE_BYTES] * 3 + [2 * MIN_PIECE_BYTES, CHUNK_BYTES, CHUNK_BYTES]


def stream_of(listing: bytes, contents: bytes = b"") -> bytes:
    hashes = [
        hashlib.sha256(contents[i : i + MIN_PIECE_BYTES]).digest() for i in range(0, len(contents), MIN_PIECE_BYTES)
    ]
    return struct.pack("<QQ", len(listing), len(contents)) + b"".join(hashes) + listing + contents


def name_of(stream: bytes) -> str:
    """The name that a stream without contents claims."""
    return hashlib.sha256(stream).hexdigest()


def test_master_reads_no_long_list_of_files(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    path.write_bytes(stream := stream_of(msgspec.msgpack.encode([("a", 0)] * 250_000)))
    began = time.process_time()
    with refused(InvalidFile):
        BlobStream(path, name_of(stream)).file("model.safetensors", 10)
    assert time.process_time() - began < 0.1


def test_node_decodes_no_list_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_module, "_MAX_FILES", 20)
    for count, fits in ((20, True), (21, False), (70_000, False)):
        stream = stream_of(msgspec.msgpack.encode([(f"{number:x}", 0) for number in range(count)]))
        arrival = BlobWriter(name_of(stream), tmp_path / "to")
        if fits:
            arrival.add_head(stream)
        else:
            with refused(InvalidFile):
                arrival.add_head(stream)
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
        arrival.add_head(blob.read(0, blob.num_bytes))
        assert read_back(arrival.finish()) == FILES
        arrival.close()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "a\\b", "c:out", "a\0b"])
def test_no_file_is_written_outside_the_blob_folder(tmp_path: Path, path: str) -> None:
    with refused(InvalidValue):
        receive(tmp_path, [(path, 1)], b"x")


@pytest.mark.parametrize(
    ("files", "contents", "sentence"),
    [
        ([("a", 1)], b"xy", "is longer or shorter than its list of files says"),
        ([("a", 3)], b"xy", "is longer or shorter than its list of files says"),
        ([("a", -1)], b"", "must be inside"),
        ("no list", b"", "has no list of files"),
        ([("a", 1), ("./a", 1)], b"xy", "File exists"),
    ],
    ids=["longer", "shorter", "negative", "no list", "twice the same"],
)
def test_invalid_blob_streams_are_rejected(tmp_path: Path, files: Any, contents: bytes, sentence: str) -> None:
    with pytest.raises((EvenerError, FileExistsError), match=sentence):
        receive(tmp_path, files, contents)
    assert list(tmp_path.iterdir()) == []


def test_oversized_file_list_is_rejected_before_it_is_stored(tmp_path: Path) -> None:
    for sizes in ((2**40, 0), (0, 2**50), (2**64 - 1, 2**64 - 1)):
        for one in (BlobWriter("0" * 64, tmp_path), StreamWriter("0" * 64, tmp_path)):
            with refused(InvalidFile):
                one.add_head(struct.pack("<QQ", *sizes)) if isinstance(one, BlobWriter) else one.add(
                    struct.pack("<QQ", *sizes)
                )
            one.close()


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
    stream = stream_of(msgspec.msgpack.encode(files), contents)
    arrival = BlobWriter(name_of(stream[: len(stream) - len(contents)]), folder)
    try:
        arrival.add_head(stream)
        arrival.finish()
    finally:
        arrival.close()
