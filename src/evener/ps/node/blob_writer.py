"""Writes the files of a blob from its pieces, in any order.

    blobs/DIGEST            a complete blob
    blobs/.DIGEST...        the draft of one that is being received; it is renamed when nothing is missing
    blobs/DIGEST.part       the files of one that was incomplete when a run ended, and a list of its missing pieces

A blob is either complete or absent. Files that are read while they arrive stay in the draft until the run that reads
them has ended.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

import msgspec

from evener.ps.protocol.blob import FileRange, Files, HeadReader, blob_folder, damaged
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidFile, MissingFile
from evener.system.awaited_files import announce_files, complete_file, complete_folder

_FILES, _MISSING = "files", "missing"
"""In the folder of an incomplete blob."""


class EarlyFiles(FileRange):
    """Files that are read while they arrive (`awaited_files`).

    Args:
        root: folder.
        files: their paths and sizes, in the order of the paths.
    """

    def __init__(self, root: Path, files: Files) -> None:
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


class StoredBlob:
    """A blob whose files are here. With its head, which comes from the master, other nodes can be served. Close it.

    Args:
        digest: name of the blob.
        root: folder of its files.

    Attributes:
        head: head of the blob.
        missing: pieces that have not come; None before the head is complete.
        root: folder of the files.
        is_early: whether the files may be read while they arrive; known when the head is complete.
    """

    def __init__(self, digest: str, root: Path) -> None:
        self._digest, self.root, self.is_early = digest, root, False
        self._files = FileRange(root, [])
        self.head = HeadReader(digest)
        self.missing: set[int] | None = None

    def add_head(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the stream, until the head is complete.

        Raises:
            InvalidFile: this is not the head of the blob.
            InvalidValue: a path leads out of the blob's folder.
            OSError: the files cannot be created.
        """
        if self.head.add(data) is not None:
            self._files, self.missing = FileRange(self.root, self.head.files()), set()

    def add(self, piece: int, data: bytes | memoryview) -> None:
        """Write a piece if it is missing.

        Raises:
            InvalidFile: it is damaged.
            OSError: it cannot be written.
        """

    def pieces_of(self, _path: str) -> set[int]:
        """Return the missing pieces of a file."""
        return set()

    def read(self, piece: int) -> bytes | None:
        """Return a piece; None if it has not come. Raises MissingFile: its files were removed."""
        if self.missing is None or piece in self.missing:
            return None
        return self._files.read(piece * self.head.piece_bytes, self.head.piece_bytes)

    def finish(self) -> Path:
        """Put a complete blob into its place, and return its folder.

        Raises:
            InvalidFile: pieces are missing.
        """
        return self.root

    def close(self) -> None:
        """Remove a draft, if there is one."""


class BlobWriter(StoredBlob):
    """Writes the files of a blob that is being received. If some are missing at its end, a later run continues there.

    Args:
        digest: name of the blob.
        into: folder of blobs.
        is_early: whether the files may be read while they arrive.
    """

    def __init__(self, digest: str, into: Path, *, is_early: bool = False) -> None:
        self._place, self._part = blob_folder(into, digest), into / f"{digest}.part"
        into.mkdir(parents=True, exist_ok=True)
        super().__init__(digest, Path(tempfile.mkdtemp(dir=into, prefix=f".{digest[:16]}.")))
        self._draft, self.is_early, self._can_write = self.root, is_early, True

    def add_head(self, data: bytes | memoryview) -> None:
        """Add the next bytes; the whole of a short blob comes with the head. Raises as in the base class."""
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
        self._copy_earlier_pieces(files)

    def _copy_earlier_pieces(self, files: Files) -> None:
        """Take the pieces that have come before an earlier run ended, unless they were changed since."""
        assert self.missing is not None
        folder = Path(tempfile.mkdtemp(dir=self._place.parent, prefix=self._draft.name))
        try:
            part = self._part.rename(folder / self._part.name)  # so that no other process takes it, too
            earlier = FileRange(part / _FILES, files)
            missing = decode_msgpack((part / _MISSING).read_bytes(), set[int])
            for piece in sorted(self.missing - missing):
                with suppress(InvalidFile, MissingFile):
                    self.add(piece, earlier.read(piece * self.head.piece_bytes, self.head.piece_bytes))
        except (OSError, msgspec.DecodeError):  # there are none, or there is no room for both
            self._can_write = True  # when the earlier ones are gone
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, piece: int, data: bytes | memoryview) -> None:
        """Write a piece if it is missing. Raises as in the base class."""
        assert self.missing is not None
        if piece not in self.missing:
            return
        if hashlib.sha256(data).digest() != self.head.hash_of(piece):
            raise damaged(self._digest)
        try:
            self._files.write(piece * self.head.piece_bytes, data)
        except OSError:
            self._can_write = False
            raise
        self.missing.discard(piece)
        if self.is_early and not self.missing:
            complete_folder(self._draft)

    def pieces_of(self, path: str) -> set[int]:
        """Return the missing pieces of a file."""
        if not isinstance(self._files, EarlyFiles) or not (part := self._files.range_of(path)):
            return set()
        size = self.head.piece_bytes
        return set(range(part.start // size, (part.stop - 1) // size + 1)) & (self.missing or set())

    def finish(self) -> Path:
        """Move the complete blob into its place, and return its folder. Raises as in the base class."""
        if self.missing is None or self.missing:
            raise damaged(self._digest)
        try:
            self._draft.rename(self._place)
        except OSError:
            if not self._place.is_dir():  # else another process has received it, too
                raise
        self._files.root = self.root = self._place
        shutil.rmtree(self._part, ignore_errors=True)  # which another process has left
        return self._place

    def close(self) -> None:
        """Keep the pieces of an incomplete blob for a later run, unless its files could not be written."""
        if self.missing and self._can_write and len(self.missing) < self.head.num_pieces:
            with suppress(OSError):  # another process has left its pieces, or there is no room
                self._keep(self.missing)
        shutil.rmtree(self._draft, ignore_errors=True)
        complete_folder(self._draft)

    def _keep(self, missing: set[int]) -> None:
        """Move the draft to where a later run looks for it. Raises OSError."""
        folder = Path(tempfile.mkdtemp(dir=self._place.parent, prefix=self._draft.name))
        try:
            (folder / _MISSING).write_bytes(msgspec.msgpack.encode(missing))
            self._draft.rename(folder / _FILES)
            folder.rename(self._part)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
