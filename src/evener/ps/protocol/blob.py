"""Blobs: a task's code or a data set as one stream of bytes, named by the SHA-256 of its head.

    stream    head | contents of the files, one after the other
    head      bytes of list and contents, 8 B each | SHA-256 of each piece | list of (path, size) as msgpack
    piece     128 KiB of the contents, or 256 KiB to 1 MiB of a large blob; the last one may be shorter

With the head, each piece can be checked by itself, so pieces may come in any order, and from any node. A node has the
files in a folder (`ps.node.blob_writer`), the master the stream in one file (`blob_stream`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath

import msgspec

from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile, InvalidInput, MissingFile, require
from evener.system.awaited_files import opened_at_once

CHUNK_BYTES = 1 << 20
"""Most bytes of a piece, and of the stream in one message."""
MIN_PIECE_BYTES = 1 << 17
_MANY_PIECES = 1 << 16
"""Most pieces of a blob whose pieces are of the smallest size: larger ones bound the memory for their state."""
_SIZES = struct.Struct("<QQ")
_HASH_BYTES = 32
_MAX_HEAD_BYTES = 1 << 28
_MAX_SEARCHED_HEAD_BYTES = 1 << 17
"""Limit of the head of a stream in which a master looks for a file: a checkpoint of ranks."""
_MAX_FILES = 1 << 21
_NO_NAME = {"", "."}
Files = list[tuple[str, int]]
"""Paths and sizes of files."""


class HeadReader:
    """Reads the head of a stream, and decodes nothing that is long.

    Args:
        digest: name of the blob.

    Attributes:
        data: bytes of the head so far.
        num_bytes: length of the head; 0 while it is not known.
        contents_bytes: bytes of all files.
        piece_bytes: bytes of each piece but the last.
        num_pieces: number of pieces.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self.data = bytearray()
        self.num_bytes = self.contents_bytes = self.num_pieces = 0
        self.piece_bytes = MIN_PIECE_BYTES

    def add(self, data: bytes | memoryview) -> bytes | memoryview | None:
        """Add the next bytes of the stream; return those after the head, or None while it is incomplete.

        Raises:
            InvalidFile: this is no head, or not that of the blob.
        """
        before = len(self.data)
        if not self.num_bytes:
            self.data += data[: _SIZES.size - before] if before < _SIZES.size else b""
            if len(self.data) < _SIZES.size:
                return None
            list_bytes, self.contents_bytes = _SIZES.unpack(self.data)
            self.piece_bytes = piece_bytes_of(self.contents_bytes)
            self.num_pieces = -(-self.contents_bytes // self.piece_bytes)
            self.num_bytes = _SIZES.size + self.num_pieces * _HASH_BYTES + list_bytes
            if self.num_bytes > _MAX_HEAD_BYTES:
                raise InvalidFile(f"blob {self._digest[:12]} has a head of {self.num_bytes} bytes")
            data = data[_SIZES.size - before :]
            before = _SIZES.size
        missing = self.num_bytes - before
        self.data += data[:missing]
        if len(self.data) < self.num_bytes:
            return None
        if hashlib.sha256(self.data).hexdigest() != self._digest:
            raise damaged(self._digest)
        return data[missing:]

    def offset_of(self, piece: int) -> int:
        """Return where a piece begins in the stream."""
        return self.num_bytes + piece * self.piece_bytes

    def piece_at(self, offset: int) -> int:
        """Return the piece that begins at `offset` of the stream; -1 if none does."""
        piece, rest = divmod(offset - self.num_bytes, self.piece_bytes)
        return piece if not rest and 0 <= piece < self.num_pieces else -1

    def hash_of(self, piece: int) -> bytes:
        """Return the SHA-256 of a piece."""
        begin = _SIZES.size + piece * _HASH_BYTES
        return bytes(self.data[begin : begin + _HASH_BYTES])

    def length_of(self, piece: int) -> int:
        """Return the bytes of a piece."""
        return min(self.piece_bytes, self.contents_bytes - piece * self.piece_bytes)

    def files(self) -> Files:
        """Return paths and sizes of the files.

        Raises:
            InvalidFile: there is no list, or it has too many files, or others than the contents.
            InvalidValue: a path leads out of the blob.
        """
        listing = bytes(self.data[_SIZES.size + self.num_pieces * _HASH_BYTES :])
        if (num_files := _length_of(listing)) > _MAX_FILES:
            raise InvalidFile(f"blob {self._digest[:12]} has {num_files} files, and may have {_MAX_FILES}")
        try:
            files: Files = decode_msgpack(listing, Files)
        except msgspec.DecodeError as error:
            raise InvalidFile(f"blob {self._digest[:12]} has no list of files: {error}") from error
        for path, size in files:
            require(_is_safe(path) and size >= 0, "file of a blob", path, "inside of its folder")
        if sum(size for _, size in files) != self.contents_bytes:
            raise InvalidFile(f"blob {self._digest[:12]} is longer or shorter than its list of files says")
        return files


class Blob:
    """Files on this machine that may be sent.

    Attributes:
        digest: SHA-256 of the head, hexadecimal: the blob's name.
        num_bytes: length of the stream.
    """

    def __init__(self, root: Path, files: Sequence[str]) -> None:
        """List the `files`, paths relative to `root`, and read all of them.

        Raises:
            MissingFile: a file cannot be read.
            InvalidValue: there are too many files.
        """
        require(len(files) <= _MAX_FILES, "number of files", len(files), f"at most {_MAX_FILES}")
        self._files = FileRange(root, [(path, _size(root / path)) for path in sorted(files)])
        listing = msgspec.msgpack.encode(self._files.files)
        contents_bytes = self._files.num_bytes
        size = piece_bytes_of(contents_bytes)
        pieces = range(0, contents_bytes, size)
        hashes = b"".join(hashlib.sha256(self._files.read(offset, size)).digest() for offset in pieces)
        self._head = _SIZES.pack(len(listing), contents_bytes) + hashes + listing
        self.num_bytes = len(self._head) + contents_bytes
        self.digest = hashlib.sha256(self._head).hexdigest()

    def read(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes of the stream from `offset` on; fewer only at its end.

        Raises:
            InvalidValue: the offset is negative.
            MissingFile: a file was removed or became shorter after the blob was made.
        """
        require(offset >= 0, "offset", offset, "zero or more")
        head = self._head[offset : offset + length]
        return head + self._files.read(max(0, offset - len(self._head)), length - len(head))


class FileRange:
    """Files in a folder, one after the other, as one range of bytes.

    Args:
        root: folder.
        files: their paths and sizes.

    Attributes:
        num_bytes: bytes of all files.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self.root, self.files = root, files
        self._ends = list(accumulate((size for _, size in files), initial=0))
        self.num_bytes = self._ends[-1]

    def parts(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index of the file, first byte, bytes) of the parts of files in a range."""
        end = min(offset + length, self.num_bytes)
        index = bisect_right(self._ends, offset) - 1
        while offset < end:
            count = min(end, self._ends[index + 1]) - offset
            if count > 0:
                yield index, offset - self._ends[index], count
            offset, index = offset + max(0, count), index + 1

    def read(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on; fewer only at the end.

        Raises:
            MissingFile: a file was removed or became shorter.
        """
        read = []
        for index, first, count in self.parts(offset, length):
            path = self.root / self.files[index][0]
            try:
                with opened_at_once(), path.open("rb") as file:
                    file.seek(first)
                    part = file.read(count)
            except OSError as error:
                raise MissingFile(f"cannot read {path}: {error.strerror}") from error
            if len(part) < count:
                raise MissingFile(f"{path} has become shorter while it was sent")
            read.append(part)
        return b"".join(read)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes from `offset` on into files that exist. Raises OSError."""
        done = 0
        for index, first, count in self.parts(offset, len(data)):
            with opened_at_once(), (self.root / self.files[index][0]).open("r+b") as file:
                file.seek(first)
                file.write(data[done : done + count])
            done += count


def files_in(read: Callable[[int, int], bytes], digest: str) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, bytes) of every file of the stream that `read(offset, length)` reads; it has few files.

    Raises:
        InvalidFile: the stream is not a blob, or its head is long.
    """
    reader = HeadReader(digest)
    rest = reader.add(read(0, _MAX_SEARCHED_HEAD_BYTES))
    if rest is None:
        raise InvalidFile(f"blob {digest[:12]} has no head, or one of more than {_MAX_SEARCHED_HEAD_BYTES} bytes")
    offset = reader.num_bytes
    for path, size in reader.files():
        yield path, offset, size
        offset += size


def whole_folder(root: Path) -> list[str]:
    """Return all files below `root` as relative paths, without hidden ones.

    Raises:
        MissingFile: the folder does not exist or is empty.
        InvalidInput: a link leads out of the folder.
    """
    files = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *names):
            _require_inside(Path(folder) / name, root)
        inside = Path(folder).relative_to(root).as_posix()
        files += [str(PurePosixPath(inside) / name) for name in names if not name.startswith(".")]
    if not files:
        raise MissingFile(f"there are no files in the data folder {root}")
    return files


class StreamCheck:
    """Checks the stream of a blob while it passes by, without unpacking it.

    Args:
        digest: name of the blob.
    """

    def __init__(self, digest: str) -> None:
        self._digest, self._head = digest, HeadReader(digest)
        self._hasher, self._piece, self._in_piece = hashlib.sha256(), 0, 0
        self._has_head = False

    def add(self, data: bytes | memoryview) -> None:
        """Check the next bytes. Raises InvalidFile: this is not the blob."""
        if not self._has_head:
            if (rest := self._head.add(data)) is None:
                return
            self._has_head, data = True, rest
        view = memoryview(data)
        while view:
            if self._piece == self._head.num_pieces:
                raise InvalidFile(f"blob {self._digest[:12]} is longer than its head says")
            count = min(len(view), self._head.length_of(self._piece) - self._in_piece)
            self._hasher.update(view[:count])
            self._in_piece += count
            view = view[count:]
            if self._in_piece == self._head.length_of(self._piece):
                if self._hasher.digest() != self._head.hash_of(self._piece):
                    raise damaged(self._digest)
                self._hasher, self._piece, self._in_piece = hashlib.sha256(), self._piece + 1, 0

    def finish(self) -> None:
        """Raise InvalidFile if bytes are missing."""
        if not self._has_head or self._piece < self._head.num_pieces:
            raise damaged(self._digest)


def piece_bytes_of(contents_bytes: int) -> int:
    """Return the bytes of each piece but the last, in a blob whose files have so many bytes."""
    size = MIN_PIECE_BYTES
    while size < CHUNK_BYTES and contents_bytes > size * _MANY_PIECES:
        size *= 2
    return size


def damaged(digest: str) -> InvalidFile:
    """Return the error of a blob that is not as its name says."""
    return InvalidFile(f"blob {digest[:12]} was damaged, or its files changed, during the transfer")


def blob_folder(blobs: Path, digest: str) -> Path:
    """Return the path of the blob `digest` in the folder `blobs`.

    Raises:
        InvalidValue: `digest` is not the name of a blob.
    """
    is_digest = len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    require(is_digest, "name of a blob", digest, "a SHA-256, hexadecimal")
    return blobs / digest


def _length_of(listing: bytes) -> int:
    """Return the number of elements of an encoded list before it is decoded; 0 if it is short, or no list."""
    size = {b"\xdc": 2, b"\xdd": 4}.get(listing[:1], 0)
    return int.from_bytes(listing[1 : 1 + size], "big")


def _is_safe(path: str) -> bool:
    """Return whether a path stays in its folder. Lists are long, and a pure path for each entry would be slow."""
    parts = path.split("/")
    leads_out = path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path
    return not leads_out and not _NO_NAME.issuperset(parts)


def _require_inside(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(
            f"{path} is a link to {path.resolve()}, outside of the folder that is sent: replace it with a copy"
        )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise MissingFile(f"cannot read {file}: {error.strerror}") from error
