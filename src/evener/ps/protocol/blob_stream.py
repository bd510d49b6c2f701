"""Blobs in a master's memory of files: each blob is one file, the stream itself, since a master only passes blobs on.

A master never unpacks a blob, so an archive of a hundred thousand files costs it no more than an archive of one file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from evener.ps.protocol.blob import StreamCheck, blob_folder, files_in
from evener.records.errors import InvalidFile, MissingFile

MIN_FREE_SHARE = 0.05
"""Share of the disk that blobs leave free."""


def why_no_disk(folder: Path) -> str:
    """Say why large files must not be written below `folder`; empty if they may."""
    disk = shutil.disk_usage(folder)
    return "" if disk.free > MIN_FREE_SHARE * disk.total else f"the master's disk is full: {disk.free} bytes are free"


class BlobStream:
    """A blob in one file.

    Args:
        path: path of the file.
        digest: name of the blob.

    Attributes:
        num_bytes: length of the stream.

    Raises:
        MissingFile: the file cannot be read.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self.digest = path, digest
        try:
            self.num_bytes = path.stat().st_size
        except OSError as error:
            raise MissingFile(f"blob {digest[:12]} is not here: {error.strerror}") from error

    def read(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes of the stream from `offset` on; fewer only at its end. Raises MissingFile."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise MissingFile(f"cannot read {self._path}: {error.strerror}") from error

    def file(self, name: str, most: int) -> bytes:
        """Return the contents of the blob's file of this name, in any folder.

        Raises:
            MissingFile: the blob has no such file, or it has more than `most` bytes.
            InvalidFile: this is not a blob, or it has many files.
        """
        for path, offset, size in files_in(self.read, self.digest):
            if path.rpartition("/")[2] == name and size <= most:
                return self.read(offset, size)
        raise MissingFile(f"blob {self.digest[:12]} has no file {name} of at most {most} bytes")


class StreamWriter:
    """A blob that is being received into one file; close it.

    Args:
        digest: name of the blob.
        into: folder of blobs.
        share: share of the free disk space that the blob may take.

    Attributes:
        received: bytes of the stream so far, which is the offset of the next piece.
    """

    def __init__(self, digest: str, into: Path, *, share: float = 1.0) -> None:
        self._digest, self._place = digest, blob_folder(into, digest)
        into.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = into
        self._draft = Path(tempfile.mkdtemp(dir=into, prefix=f".{digest[:16]}."))
        self._file = (self._draft / "stream").open("xb")
        self._check = StreamCheck(digest)
        self.received = 0
        self._most_bytes = share * shutil.disk_usage(into).free

    def add(self, piece: bytes | memoryview) -> None:
        """Write the next piece of the stream.

        Raises:
            InvalidFile: the disk has no room for it, or it is not of this blob.
            OSError: it cannot be written.
        """
        disk = shutil.disk_usage(self._folder)
        is_too_large = self.received + len(piece) > self._most_bytes
        if is_too_large or disk.free - len(piece) < MIN_FREE_SHARE * disk.total:
            raise InvalidFile(f"the master's disk has no room for blob {self._digest[:12]}")
        self._check.add(piece)
        self._file.write(piece)
        self.received += len(piece)

    def finish(self) -> None:
        """Check the whole stream. Raises InvalidFile: bytes are missing; OSError."""
        self._check.finish()
        self._file.flush()

    def sync(self) -> None:
        """Wait until the finished stream is on the disk, which may take seconds. Raises OSError."""
        os.fsync(self._file.fileno())

    def put_in_place(self) -> Path:
        """Move the synced file into place, and return its path. Raises OSError."""
        self._file.close()  # Windows moves no open file
        (self._draft / "stream").replace(self._place)
        return self._place

    def close(self) -> None:
        """Remove an incomplete blob."""
        self._file.close()
        shutil.rmtree(self._draft, ignore_errors=True)
