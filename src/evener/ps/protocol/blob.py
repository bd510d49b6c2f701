"""Blobs: a task's code or a data set as one stream of bytes, named by the SHA-256 of the stream.

    stream   length of the list, 8 B | list of (path, size) as msgpack | contents of the files, one after the other

A receiver writes the files into a draft folder while they arrive. It checks the hash at the end, and renames the folder
into place, so a blob is either complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile, InvalidInput, MissingFile, require

CHUNK_BYTES = 1 << 20
"""Bytes of the stream in one message."""
_LENGTH = struct.Struct("<Q")
_MAX_LIST_BYTES = 1 << 28
_MAX_SEARCHED_LIST_BYTES = 1 << 17
"""Limit of the list of files of a stream in which a master looks for a file: a checkpoint of ranks."""
_MAX_FILES = 1 << 21
_NO_NAME = {"", "."}
_Files = list[tuple[str, int]]


class Blob:
    """Files on this machine that may be sent.

    Attributes:
        digest: SHA-256 of the stream, hexadecimal: the blob's name.
        num_bytes: length of the stream.
    """

    def __init__(self, root: Path, files: Sequence[str], digest: str = "") -> None:
        """List the `files`, paths relative to `root`. Pass `digest` if it is known, since computing it takes time.

        Raises:
            MissingFile: a file cannot be read.
            InvalidValue: there are too many files.
        """
        self._root = root
        require(len(files) <= _MAX_FILES, "number of files", len(files), f"at most {_MAX_FILES}")
        sizes = [(path, _size(root / path)) for path in sorted(files)]
        listing = msgspec.msgpack.encode(sizes)
        self._head = _LENGTH.pack(len(listing)) + listing
        self._paths = [path for path, _ in sizes]
        self._ends = list(accumulate((size for _, size in sizes), initial=len(self._head)))
        self.num_bytes = self._ends[-1]
        self.digest = digest or self._hash()

    def read(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes of the stream from `offset` on; fewer only at its end.

        Raises:
            InvalidValue: the offset is negative.
            MissingFile: a file was removed or became shorter after the blob was made.
        """
        require(offset >= 0, "offset", offset, "zero or more")
        parts = []
        length = min(length, self.num_bytes - offset)
        while length > 0:
            part = self._piece(offset, length)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def _piece(self, offset: int, length: int) -> bytes:
        """Return bytes of the one file in which `offset` lies, or of the head."""
        if offset < len(self._head):
            return self._head[offset : offset + length]
        index = bisect_right(self._ends, offset) - 1
        path = self._root / self._paths[index]
        try:
            with path.open("rb") as file:
                file.seek(offset - self._ends[index])
                part = file.read(min(length, self._ends[index + 1] - offset))
        except OSError as error:
            raise MissingFile(f"cannot read {path}: {error.strerror}") from error
        if not part:
            raise MissingFile(f"{path} has become shorter while it was sent")
        return part

    def _hash(self) -> str:
        hasher, offset = hashlib.sha256(), 0
        while part := self.read(offset, CHUNK_BYTES):
            hasher.update(part)
            offset += len(part)
        return hasher.hexdigest()


def files_in(read: Callable[[int, int], bytes], digest: str) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, bytes) of every file of the stream that `read(offset, length)` reads; it has few files.

    Raises:
        InvalidFile: the stream is not a blob, or its list of files is long.
    """
    head = read(0, _LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    if not 0 < length <= _MAX_SEARCHED_LIST_BYTES:
        raise InvalidFile(
            f"blob {digest[:12]} has no list of files, or one of more than {_MAX_SEARCHED_LIST_BYTES} bytes"
        )
    offset = _LENGTH.size + length
    for path, size in _decoded(read(_LENGTH.size, length), digest):
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


class BlobWriter:
    """A blob that is being received; close it.

    Args:
        digest: name of the blob.
        into: folder of blobs.

    Attributes:
        received: bytes of the stream so far, which is the offset of the next piece.
    """

    def __init__(self, digest: str, into: Path) -> None:
        self._digest, self._place = digest, blob_folder(into, digest)
        into.mkdir(parents=True, exist_ok=True)
        self._draft = Path(tempfile.mkdtemp(dir=into, prefix=f".{digest[:16]}."))
        self._hasher = hashlib.sha256()
        self._head = bytearray()
        self._rest: _Files | None = None
        self._open: tuple[BinaryIO, int] | None = None
        self.received = 0

    def add(self, piece: bytes | memoryview) -> None:
        """Write the next piece of the stream.

        Raises:
            InvalidFile: the stream is not a blob, or a path leads out of the blob's folder.
        """
        self._hasher.update(piece)
        self.received += len(piece)
        if self._rest is None:
            self._head += piece
            piece = self._begin()
        view = memoryview(piece)
        while view:
            if self._open is None:
                raise InvalidFile(f"blob {self._digest[:12]} is longer than its list of files says")
            view = self._write(view)

    def finish(self) -> Path:
        """Move the complete blob into place, and return its folder.

        Raises:
            InvalidFile: the stream does not have this digest.
        """
        if self._hasher.hexdigest() != self._digest or self._open is not None or self._rest is None:
            raise InvalidFile(f"blob {self._digest[:12]} was damaged, or its files changed, during the transfer")
        try:
            self._draft.rename(self._place)
        except OSError:
            if not self._place.is_dir():  # else another process has received it, too
                raise
        return self._place

    def close(self) -> None:
        """Remove an incomplete blob."""
        if self._open is not None:
            self._open[0].close()
            self._open = None
        shutil.rmtree(self._draft, ignore_errors=True)

    def _begin(self) -> bytes:
        """Read the list of files once it is complete; return the bytes of the head that belong to the files."""
        if len(self._head) < _LENGTH.size:
            return b""
        (length,) = _LENGTH.unpack_from(self._head)
        if length > _MAX_LIST_BYTES:
            raise InvalidFile(f"blob {self._digest[:12]} has a list of {length} bytes")
        end = _LENGTH.size + length
        if len(self._head) < end:
            return b""
        self._rest = _decoded(bytes(self._head[_LENGTH.size : end]), self._digest)[::-1]
        rest = bytes(self._head[end:])
        self._head.clear()
        self._next_file()
        return rest

    def _next_file(self) -> None:
        """Open the next file that has contents, and create the empty ones before it."""
        assert self._rest is not None
        self._open = None
        while self._rest and self._open is None:
            path, size = self._rest.pop()
            target = self._draft / path
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
            if size:
                self._open = file, size
            else:
                file.close()

    def _write(self, view: memoryview) -> memoryview:
        """Write the part that belongs to the open file; return the rest."""
        assert self._open is not None
        file, missing = self._open
        file.write(view[:missing])
        count = min(missing, len(view))
        if count == missing:
            file.close()
            self._next_file()
        else:
            self._open = file, missing - count
        return view[count:]


def blob_folder(blobs: Path, digest: str) -> Path:
    """Return the path of the blob `digest` in the folder `blobs`.

    Raises:
        InvalidValue: `digest` is not the name of a blob.
    """
    is_digest = len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    require(is_digest, "name of a blob", digest, "a SHA-256, hexadecimal")
    return blobs / digest


def _decoded(listing: bytes, digest: str) -> _Files:
    """Return the list of files of a stream.

    Raises:
        InvalidFile: no list, or too many files.
        InvalidValue: a path leads out of the blob.
    """
    if (num_files := _length_of(listing)) > _MAX_FILES:
        raise InvalidFile(f"blob {digest[:12]} has {num_files} files, and may have {_MAX_FILES}")
    try:
        files: _Files = decode_msgpack(listing, _Files)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"blob {digest[:12]} has no list of files: {error}") from error
    for path, size in files:
        require(_is_safe(path) and size >= 0, "file of a blob", path, "inside of its folder")
    return files


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
