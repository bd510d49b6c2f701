"""Files that travel: a task's code or a data set, known by the hash of its contents, as one stream of bytes.

    stream   bytes of the list 8 B | list of (path, size) as msgpack | contents of the files, one after the other

A blob's name is the SHA-256 of its stream. Who receives it writes the files beside their place while they come,
checks the hash at the end, and moves the folder there in one step: a blob is there whole or not at all.
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

from evener.records.errors import InvalidFile, InvalidInput, MissingFile, require

CHUNK_BYTES = 1 << 20
"""Of the stream, in one message."""
_LENGTH = struct.Struct("<Q")
_LONGEST_LIST = 1 << 28
_Files = list[tuple[str, int]]
_decoder = msgspec.msgpack.Decoder(_Files)


class Blob:
    """Files on this machine that may be sent.

    Attributes:
        digest: SHA-256 of the stream, hexadecimal: the blob's name.
        num_bytes: of the stream.
    """

    def __init__(self, root: Path, files: Sequence[str], digest: str = "") -> None:
        """The `files`, paths relative to `root`, as they are now; `digest` if it is known: computing it takes time.

        Raises:
            MissingFile: one cannot be read.
        """
        self._root = root
        sizes = [(path, _size(root / path)) for path in sorted(files)]
        listing = msgspec.msgpack.encode(sizes)
        self._head = _LENGTH.pack(len(listing)) + listing
        self._paths = [path for path, _ in sizes]
        self._ends = list(accumulate((size for _, size in sizes), initial=len(self._head)))
        self.num_bytes = self._ends[-1]
        self.digest = digest or self._hash()

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes of the stream from `offset` on; fewer only at its end.

        Raises:
            InvalidValue: the offset is negative.
            MissingFile: a file has gone, or become shorter, since the blob was made.
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
        """Bytes of the one file in which `offset` lies, or of the head."""
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
    """(path, offset, bytes) of every file of a stream of which `read(offset, length)` gives bytes.

    Raises:
        InvalidFile: it is none.
    """
    head = read(0, _LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _LONGEST_LIST + 1
    if length > _LONGEST_LIST:
        raise InvalidFile(f"blob {digest[:12]} has no list of files")
    offset = _LENGTH.size + length
    for path, size in _decoded(read(_LENGTH.size, length), digest):
        yield path, offset, size
        offset += size


def whole_folder(root: Path) -> list[str]:
    """All files below `root`, hidden ones left out, as relative paths.

    Raises:
        MissingFile: there is no such folder, or nothing in it.
        InvalidInput: a link leads out of the folder.
    """
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in (*folders, *names):
            _refuse_a_way_out(Path(folder) / name, root)
        inside = Path(folder).relative_to(root).as_posix()
        found += [str(PurePosixPath(inside) / name) for name in names if not name.startswith(".")]
    if not found:
        raise MissingFile(f"there are no files in the data folder {root}")
    return found


class BlobWriter:
    """A blob that is being received; close it.

    Args:
        digest: its name.
        into: folder of blobs.

    Attributes:
        received: bytes of the stream so far: the next piece has to begin there.
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
        """Take the next piece of the stream.

        Raises:
            InvalidFile: it is no blob, or wants to write outside of its folder.
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
        """The folder with all files, now that everything has come.

        Raises:
            InvalidFile: the stream is not what the digest names.
        """
        if self._hasher.hexdigest() != self._digest or self._open is not None or self._rest is None:
            raise InvalidFile(f"blob {self._digest[:12]} was damaged, or its files changed, on the way")
        try:
            self._draft.rename(self._place)
        except OSError:
            if not self._place.is_dir():  # else somebody else has received it as well
                raise
        return self._place

    def close(self) -> None:
        """Remove what has not become whole."""
        if self._open is not None:
            self._open[0].close()
            self._open = None
        shutil.rmtree(self._draft, ignore_errors=True)

    def _begin(self) -> bytes:
        """Read the list of files once it is there; what of the head belongs to the files."""
        if len(self._head) < _LENGTH.size:
            return b""
        (length,) = _LENGTH.unpack_from(self._head)
        if length > _LONGEST_LIST:
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
        """Open the next file that has contents; empty ones are made on the way."""
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
        """Write what belongs to the open file; the rest."""
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
    """Where the blob `digest` lies in the folder `blobs` if it is there.

    Raises:
        InvalidValue: `digest` is not the name of a blob.
    """
    is_digest = len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    require(is_digest, "name of a blob", digest, "a SHA-256, hexadecimal")
    return blobs / digest


def _decoded(listing: bytes, digest: str) -> _Files:
    """The list of files of a stream. Raises InvalidFile: it is none, or wants to write outside of its folder."""
    try:
        files = _decoder.decode(listing)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"blob {digest[:12]} has no list of files: {error}") from error
    for path, size in files:
        require(_is_safe(path) and size >= 0, "file of a blob", path, "inside of its folder")
    return files


def _is_safe(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and not set(path) & set("\\:\0")


def _refuse_a_way_out(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(
            f"{path} is a link to {path.resolve()}, outside of the folder that is sent: put a copy there instead"
        )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise MissingFile(f"cannot read {file}: {error.strerror}") from error
