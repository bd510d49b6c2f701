"""Blobs: a task's code or a data set as one stream of bytes, named by the SHA-256 of its head.

    stream    head | contents of the files, one after the other
    head      bytes of list and contents, 8 B each | SHA-256 of each piece | list of (path, size) as msgpack
    piece     128 KiB of the contents, or 256 KiB to 1 MiB of a large blob; the last one may be shorter

With the head, each piece can be checked by itself, so pieces may come in any order, and from any node. A node writes
the files into a draft folder, which it renames when nothing is missing: a blob is either complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath

import msgspec

from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile, InvalidInput, MissingFile, require
from evener.system.awaited_files import announce_files, complete_file, complete_folder, opened_at_once

CHUNK_BYTES = 1 << 20
"""Most bytes of a piece, and of the stream in one message."""
MIN_PIECE_BYTES = 1 << 17
_MANY_PIECES = 1 << 16
"""Pieces from which on each is larger: what is known of them stays small."""
_SIZES = struct.Struct("<QQ")
_HASH_BYTES = 32
_MAX_HEAD_BYTES = 1 << 28
_MAX_SEARCHED_HEAD_BYTES = 1 << 17
"""Limit of the head of a stream in which a master looks for a file: a checkpoint of ranks."""
_MAX_FILES = 1 << 21
_NO_NAME = {"", "."}
_Files = list[tuple[str, int]]


class HeadReader:
    """Reads the head of a stream, and decodes nothing that is long.

    Args:
        digest: name of the blob.

    Attributes:
        data: bytes of the head so far.
        num_bytes: length of the head; 0 while it is not known.
        contents_bytes: bytes of all files.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self.data = bytearray()
        self.num_bytes = self.contents_bytes = 0

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

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return -(-self.contents_bytes // self.piece_bytes)

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece but the last."""
        return piece_bytes_of(self.contents_bytes)

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

    def files(self) -> _Files:
        """Return paths and sizes of the files.

        Raises:
            InvalidFile: there is no list, or it has too many files, or others than the contents.
            InvalidValue: a path leads out of the blob.
        """
        listing = bytes(self.data[_SIZES.size + self.num_pieces * _HASH_BYTES :])
        if (num_files := _length_of(listing)) > _MAX_FILES:
            raise InvalidFile(f"blob {self._digest[:12]} has {num_files} files, and may have {_MAX_FILES}")
        try:
            files: _Files = decode_msgpack(listing, _Files)
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

    def __init__(self, root: Path, files: _Files) -> None:
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


class EarlyFiles(FileRange):
    """Files that are read while they arrive (`awaited_files`).

    Args:
        root: folder.
        files: their paths and sizes, in the order of the paths.
    """

    def __init__(self, root: Path, files: _Files) -> None:
        super().__init__(root, files)
        self._missing_bytes = [size for _, size in files]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes that have not been written before. Raises OSError."""
        super().write(offset, data)
        for index, _, count in self.parts(offset, len(data)):
            self._missing_bytes[index] -= count
            if not self._missing_bytes[index]:
                complete_file(self.root, self.files[index][0])

    def range_of(self, path: str) -> range:
        """Return the bytes of a file that has not come; none if there is no such file."""
        index = bisect_left(self.files, (path, 0))
        if index == len(self.files) or self.files[index][0] != path or not self._missing_bytes[index]:
            return range(0)
        return range(self._ends[index], self._ends[index + 1])


class BlobWriter:
    """Files of a blob that is being received; close it.

    Args:
        digest: name of the blob.
        into: folder of blobs.
        is_early: whether the files may be read while they arrive.

    Attributes:
        head: head of the blob, which comes first.
        missing: pieces that have not come; None before the head is complete.
        root: folder of the files: a draft, until `finish` puts it in place.
        is_early: whether the files may be read while they arrive; known when the head is complete.
    """

    def __init__(self, digest: str, into: Path, *, is_early: bool = False) -> None:
        self._digest, self._place = digest, blob_folder(into, digest)
        into.mkdir(parents=True, exist_ok=True)
        self.root = self._draft = Path(tempfile.mkdtemp(dir=into, prefix=f".{digest[:16]}."))
        self._files, self.is_early = FileRange(self._draft, []), is_early
        self.head = HeadReader(digest)
        self.missing: set[int] | None = None

    def add_head(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the stream, until the head is complete. The whole of a short blob comes with it.

        Raises:
            InvalidFile: this is not the head of the blob.
            InvalidValue: a path leads out of the blob's folder.
            OSError: the files cannot be created.
        """
        if (rest := self.head.add(data)) is None:
            return
        files = self.head.files()
        is_plain = files == sorted(files) and not any("\n" in path for path, _ in files)
        self.is_early = self.is_early and is_plain and announce_files(self._draft, files)
        if not self.is_early:
            for path, _ in files:
                (self._draft / path).parent.mkdir(parents=True, exist_ok=True)
                (self._draft / path).open("xb").close()
        self._files = (EarlyFiles if self.is_early else FileRange)(self._draft, files)
        self.missing = set(range(self.head.num_pieces))
        for piece in range(self.head.num_pieces):
            begin = piece * self.head.piece_bytes
            if begin + self.head.length_of(piece) > len(rest):
                break
            self.add(piece, rest[begin : begin + self.head.length_of(piece)])

    def add(self, piece: int, data: bytes | memoryview) -> None:
        """Write a piece.

        Raises:
            InvalidFile: it is damaged.
            OSError: it cannot be written.
        """
        assert self.missing is not None
        if piece not in self.missing:
            return
        if hashlib.sha256(data).digest() != self.head.hash_of(piece):
            raise damaged(self._digest)
        self._files.write(piece * self.head.piece_bytes, data)
        self.missing.discard(piece)
        if self.is_early and not self.missing:
            complete_folder(self._draft)

    def pieces_of(self, path: str) -> set[int]:
        """Return the missing pieces of a file."""
        if not isinstance(self._files, EarlyFiles) or not (part := self._files.range_of(path)):
            return set()
        size = self.head.piece_bytes
        return set(range(part.start // size, (part.stop - 1) // size + 1)) & (self.missing or set())

    def read(self, piece: int) -> bytes | None:
        """Return a piece; None if it has not come. Raises MissingFile: its files were removed."""
        if self.missing is None or piece in self.missing:
            return None
        return self._files.read(piece * self.head.piece_bytes, self.head.piece_bytes)

    def finish(self) -> Path:
        """Move the complete blob into place, and return its folder.

        Raises:
            InvalidFile: pieces are missing.
        """
        if self.missing is None or self.missing:
            raise damaged(self._digest)
        try:
            self._draft.rename(self._place)
        except OSError:
            if not self._place.is_dir():  # else another process has received it, too
                raise
        self._files.root = self.root = self._place
        return self._place

    def close(self) -> None:
        """Remove an incomplete blob."""
        shutil.rmtree(self._draft, ignore_errors=True)
        complete_folder(self._draft)


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
