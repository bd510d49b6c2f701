"""Blobs pass to the master: code and data from the command that submits a run, checkpoints from a node.

The receiver asks for one piece after the other, a few pieces ahead, so the sender never sends more than the receiver
takes. After a broken connection it continues from where it was. A thread waits for the disk, since the master has to
answer its nodes. This module does not send: it returns messages. Nodes receive pieces in any order
(`ps.node.blob_fetcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from evener.ps.protocol.blob import CHUNK_BYTES, Blob, blob_folder
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
from evener.ps.protocol.messages import BlobChunk, FetchBlob
from evener.records.errors import EvenerError, MissingFile

AHEAD = 8
"""Pieces that are requested before the first of them has arrived."""


class StreamReceiver:
    """Receives the streams of blobs, one after the other; close it.

    Args:
        folder: folder of the streams that are present.
        writer: makes the writer of a stream, from its digest and `folder`.
        ahead: pieces that are requested before the first of them has arrived.
    """

    def __init__(
        self, folder: Path, writer: Callable[[str, Path], StreamWriter] = StreamWriter, ahead: int = AHEAD
    ) -> None:
        self._folder, self._writer, self._ahead = folder, writer, ahead
        self._wanted: list[str] = []
        self._arrival: StreamWriter | None = None
        self._syncing: Future[None] | None = None
        self._requested_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether all requested blobs are present."""
        return not self._wanted

    @property
    def is_syncing(self) -> bool:
        """Whether a complete blob is being written to the disk; `tick` notices the end."""
        return self._syncing is not None

    def request(self, digests: Iterable[str]) -> list[FetchBlob]:
        """Request these blobs and no others; return the first messages to send."""
        self.close()
        self._wanted = [digest for digest in digests if not self.path_of(digest).exists()]
        return self.resume()

    def resume(self) -> list[FetchBlob]:
        """Return the messages to send over a new connection."""
        if not self._wanted:
            return []
        self._arrival = self._arrival or self._writer(self._wanted[0], self._folder)
        self._requested_bytes = self._arrival.received
        return [self._next() for _ in range(self._ahead)]

    def takes(self, chunk: BlobChunk) -> bool:
        """Return whether a piece is the next one; others were requested over a lost connection, or never."""
        arrival = self._arrival
        is_next = arrival is not None and chunk.digest == self._wanted[0] and chunk.offset == arrival.received
        return is_next and not self.is_syncing

    def receive(self, chunk: BlobChunk, data: memoryview) -> list[FetchBlob]:
        """Write a piece that arrived; return the next messages to send.

        Raises:
            EvenerError: the blob is not available, or is damaged.
            OSError: the piece cannot be written here.
        """
        arrival = self._arrival
        if arrival is None or not self.takes(chunk):
            return []
        if not data:
            raise MissingFile(f"blob {chunk.digest[:12]} is no longer available")
        arrival.add(data)
        if arrival.received < chunk.total:
            return [self._next()] if self._requested_bytes < chunk.total else []
        arrival.finish()
        thread = ThreadPoolExecutor(1, "evener-sync")
        self._syncing = thread.submit(arrival.sync)
        thread.shutdown(wait=False)
        return []

    def tick(self) -> list[FetchBlob]:
        """Put a complete blob in place once it is on the disk; return the next messages to send. Raises OSError."""
        if self._arrival is None or self._syncing is None or not self._syncing.done():
            return []
        self._syncing.result()
        self._arrival.put_in_place()
        return self.request(self._wanted[1:])

    def path_of(self, digest: str) -> Path:
        """Return the path of a blob."""
        return blob_folder(self._folder, digest)

    def close(self) -> None:
        """Forget an incomplete blob."""
        arrival, syncing = self._arrival, self._syncing
        self._wanted, self._arrival, self._syncing = [], None, None
        if arrival is not None and syncing is not None:
            syncing.add_done_callback(lambda _: arrival.close())
        elif arrival is not None:
            arrival.close()

    def _next(self) -> FetchBlob:
        fetch = FetchBlob(digest=self._wanted[0], offset=self._requested_bytes)
        self._requested_bytes += CHUNK_BYTES
        return fetch


class BlobSender:
    """Answers requests for pieces of blobs.

    Args:
        folder: folder of received blobs, each one file, if there is one.
        blobs: further blobs that may be sent.
    """

    def __init__(self, folder: Path | None = None, blobs: Iterable[Blob] = ()) -> None:
        self._folder = folder
        self._blobs: dict[str, Blob | BlobStream] = {blob.digest: blob for blob in blobs}

    def chunk(self, fetch: FetchBlob) -> tuple[BlobChunk, bytes]:
        """Return the requested piece; it is empty if the blob is not available."""
        try:
            blob = self._blob(fetch.digest)
            data = blob.read(fetch.offset, fetch.num_bytes)
        except EvenerError:
            return BlobChunk(digest=fetch.digest, offset=fetch.offset, total=0), b""
        return BlobChunk(digest=fetch.digest, offset=fetch.offset, total=blob.num_bytes), data

    def num_bytes(self, digest: str) -> int:
        """Return the length of a blob's stream; 0 if it is not available."""
        try:
            return self._blob(digest).num_bytes
        except EvenerError:
            return 0

    def _blob(self, digest: str) -> Blob | BlobStream:
        if digest not in self._blobs:
            if self._folder is None:
                raise MissingFile(f"blob {digest[:12]} is not here")
            return BlobStream(blob_folder(self._folder, digest), digest)
        return self._blobs[digest]
