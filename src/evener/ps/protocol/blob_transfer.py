"""Blobs pass from the command that submits a run to the master, and from there to every node that lacks them.

Who lacks a blob asks for it piece by piece, a few pieces ahead, so that nobody is sent more than it takes; after a
broken connection it asks on from where it was. Messages go in and come out; sending them is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from evener.ps.protocol.blob import CHUNK_BYTES, Blob, BlobWriter, blob_folder
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
from evener.ps.protocol.messages import BlobChunk, FetchBlob
from evener.records.errors import EvenerError, MissingFile

AHEAD = 8
"""Pieces that are asked for before the first of them has come."""


class BlobReceiver:
    """Receives blobs, one after the other; close it.

    Args:
        folder: of the blobs that are there.
        writer: makes what a blob is received into, of its digest and `folder`: a folder of its files, or one file.
        ahead: pieces that are asked for before the first of them has come.
    """

    def __init__(
        self, folder: Path, writer: Callable[[str, Path], BlobWriter | StreamWriter] = BlobWriter, ahead: int = AHEAD
    ) -> None:
        self._folder, self._writer, self._ahead = folder, writer, ahead
        self._wanted: list[str] = []
        self._arrival: BlobWriter | StreamWriter | None = None
        self._asked = 0

    @property
    def is_complete(self) -> bool:
        """Whether everything that was wanted is there."""
        return not self._wanted

    def request(self, digests: Iterable[str]) -> list[FetchBlob]:
        """Want these blobs and no others; what to ask for first."""
        self.close()
        self._wanted = [digest for digest in digests if not self.path_of(digest).exists()]
        return self.resume()

    def resume(self) -> list[FetchBlob]:
        """What to ask for over a new connection."""
        if not self._wanted:
            return []
        self._arrival = self._arrival or self._writer(self._wanted[0], self._folder)
        self._asked = self._arrival.received
        return [self._next() for _ in range(self._ahead)]

    def receive(self, chunk: BlobChunk, data: memoryview) -> list[FetchBlob]:
        """Keep a piece that came; what to ask for now.

        Raises:
            EvenerError: the blob is not to be had, or is damaged.
            OSError: it cannot be written here.
        """
        arrival = self._arrival
        if arrival is None or chunk.digest != self._wanted[0] or chunk.offset != arrival.received:
            return []  # asked for over a connection that is gone, or beyond the end
        if not data:
            raise MissingFile(f"blob {chunk.digest[:12]} is not to be had any more")
        arrival.add(data)
        if arrival.received < chunk.total:
            return [self._next()] if self._asked < chunk.total else []
        arrival.finish()
        return self.request(self._wanted[1:])

    def path_of(self, digest: str) -> Path:
        """Where the blob lies once it is there."""
        return blob_folder(self._folder, digest)

    def close(self) -> None:
        """Forget what has not become whole."""
        self._wanted = []
        if self._arrival is not None:
            self._arrival.close()
            self._arrival = None

    def _next(self) -> FetchBlob:
        fetch = FetchBlob(digest=self._wanted[0], offset=self._asked)
        self._asked += CHUNK_BYTES
        return fetch


class BlobSender:
    """Gives pieces of blobs to whoever asks.

    Args:
        folder: of blobs that have been received, each as one file, if there is one.
        blobs: others that may be sent.
    """

    def __init__(self, folder: Path | None = None, blobs: Iterable[Blob] = ()) -> None:
        self._folder = folder
        self._blobs: dict[str, Blob | BlobStream] = {blob.digest: blob for blob in blobs}

    def chunk(self, fetch: FetchBlob) -> tuple[BlobChunk, bytes]:
        """The piece that was asked for; empty if it is not to be had."""
        try:
            blob = self._blob(fetch.digest)
            data = blob.read(fetch.offset, CHUNK_BYTES)
        except EvenerError:
            return BlobChunk(digest=fetch.digest, offset=fetch.offset, total=0), b""
        return BlobChunk(digest=fetch.digest, offset=fetch.offset, total=blob.num_bytes), data

    def _blob(self, digest: str) -> Blob | BlobStream:
        if digest not in self._blobs:
            if self._folder is None:
                raise MissingFile(f"blob {digest[:12]} is not here")
            return BlobStream(blob_folder(self._folder, digest), digest)
        return self._blobs[digest]
