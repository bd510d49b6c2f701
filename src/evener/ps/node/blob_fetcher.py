"""Fetches the code and data of a run, from the master and from the nodes to which the master has sent them.

    FetchBlob: the head, then pieces in a random order, a few at a time
    <- BlobChunk      the piece
    <- FetchFrom      the master has sent it to another node: a thread fetches it there (`piece_exchange`)

The order differs from node to node, so that the master sends most pieces once. Each node that has a large blob serves
it until its part in the run ends; if it has one from an earlier run, it fetches the head alone, with which it serves.
The blob is complete in the thread that handles the master's messages: if the last piece came from another node, the
answer to a request for the empty end of the blob wakes that thread.

A run may begin when the head of its data has come, if they are read early (`system.awaited_files`). Pieces for which a
process waits are then fetched first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import TypeAlias

from msgspec.structs import replace

from evener.ps.node.blob_writer import BlobWriter, StoredBlob
from evener.ps.node.piece_exchange import Holder, PieceServer, Reads
from evener.ps.protocol.blob import CHUNK_BYTES, blob_folder
from evener.ps.protocol.messages import MAX_COMPLETE, BlobChunk, FetchBlob, FetchFrom, Header
from evener.records.errors import EvenerError, InvalidFile, MissingFile
from evener.system.awaited_files import Wanted
from evener.wire.errors import CannotJoin, ConnectionLost

FIRST_BYTES = 2**16
"""Bytes of the first request, which comes to every node from the master."""
AHEAD = 12
"""Pieces that are requested of the master before the first of them has arrived."""
_EARLY_AHEAD = 3
"""The same while a process may need other pieces first."""
SHARED_BYTES = 2**25
"""Length of a blob from which on nodes serve it to each other; a shorter one is soon everywhere."""
_PAUSES, _ACTIVE_SECONDS = (0.002, 0.02), 1.0
"""Seconds between two looks at what processes wait for, while some did within the active seconds, and else."""
_SLOW, _BACKLOG_SECONDS, _BACKLOG_SHARE = 4.0, 10.0, 0.5
"""A node that serves so many times slower than the master is spared the last pieces. So is one whose requests would
take longer than these seconds and this share of the time that has passed."""
_URGENT_SECONDS = 2.0
"""Time after which the master is asked for a piece for which a process waits, if another node has not sent it."""
_MAX_HOLDERS = 16

Serve: TypeAlias = Callable[[Reads], PieceServer]
"""Opens a server of pieces. Raises EvenerError."""


class BlobFetcher:
    """Fetches blobs, one after the other; close it.

    Args:
        folder: folder of the blobs that are present.
        send: sends a message to the master, from any thread.
        serve: opens a server for other nodes; None for none.
    """

    def __init__(self, folder: Path, send: Callable[[Header], None], serve: Serve | None = None) -> None:
        self._folder, self._send, self._open_server = folder, send, serve
        self._lock = threading.RLock()
        self._wanted: list[str] = []
        self._writers: dict[str, StoredBlob] = {}
        self._requested: dict[int, FetchBlob] = {}
        self._order: list[int] = []
        self._direct: list[int] = []
        self._holders: dict[str, Holder] = {}
        self._server: PieceServer | None = None
        self._failure: OSError | None = None
        self._began, self._num_sent = 0.0, 0
        self._complete: list[str] = []
        self._early = ""
        self._urgent: deque[int] = deque()
        self._prioritised: dict[int, float] = {}
        self._owner = threading.current_thread()
        self._outbox: SimpleQueue[Header | None] | None = None
        self._is_closed = threading.Event()

    @property
    def is_complete(self) -> bool:
        """Whether all requested blobs are present."""
        return not self._wanted

    @property
    def can_begin(self) -> bool:
        """Whether all are present but one whose files are read while they arrive."""
        with self._lock:
            if not self._wanted:
                return True
            return self._wanted == [self._early] and self._writer.is_early and self._writer.missing is not None

    def request(self, digests: Iterable[str], early: str = "") -> None:
        """Request these blobs.

        Args:
            digests: their names.
            early: the one of them whose files may be read while they arrive; empty for none.
        """
        wanted = []
        for digest in digests:
            if not (folder := self.path_of(digest)).exists():
                wanted.append(digest)
            elif self._open_server is not None and _has_bytes(folder, SHARED_BYTES):
                self._complete.append(digest)
        with self._lock:
            self._wanted, self._early = sorted(wanted, key=lambda digest: digest == early), early
            self._wanted[:0] = self._complete
            self._begin()

    def resume(self) -> None:
        """Send all requests again, over a new connection."""
        with self._lock:
            if self._server is not None:
                self._offer(self._server)
            if self._wanted and self._writer.missing is None:
                self._ask_for_head()
            elif self._wanted and not self._writer.missing:
                self._wake()
            for fetch in self._requested.values():
                self._say(fetch)

    def receive(self, chunk: BlobChunk, data: memoryview) -> None:
        """Take a piece that the master sends.

        Raises:
            EvenerError: the blob is not available, or is damaged.
            OSError: a piece cannot be written here.
        """
        with self._lock:
            if not self._wanted or chunk.digest != self._wanted[0]:
                return
            if not chunk.total and chunk.digest in self._complete:  # it cannot be served without its head
                self._complete.remove(chunk.digest)
                self._wanted.pop(0)
                self._begin()
                return
            if not chunk.total:
                raise MissingFile(f"blob {chunk.digest[:12]} is no longer available")
            if self._failure is not None:
                raise self._failure
            writer = self._writer
            if writer.missing is None:
                self._take_head(writer, chunk, data)
            elif (piece := self._piece_at(chunk.offset)) in self._requested:
                del self._requested[piece]
                writer.add(piece, data)
                self._prioritised.pop(piece, None)
                self._num_sent += 1
            self._fill()
            if writer.missing is not None and not writer.missing:
                if not writer.is_early:
                    writer.finish()
                self._wanted.pop(0)
                self._begin()

    def fetch_from(self, where: FetchFrom) -> None:
        """Have a piece fetched from another node."""
        with self._lock:
            if not self._wanted or where.digest != self._wanted[0]:
                return
            if (fetch := self._requested.pop(self._piece_at(where.offset), None)) is None:
                return
            piece = self._piece_at(where.offset)
            holder = self._holder_at(where)
            if holder is None or not holder.request(fetch, is_urgent=piece in self._prioritised):
                self._direct.append(piece)
            self._fill()

    def _holder_at(self, where: FetchFrom) -> Holder | None:
        """Return the node that serves at an address; None if pieces are fetched from too many."""
        if where.address not in self._holders:
            if sum(not one.is_over for one in self._holders.values()) >= _MAX_HOLDERS:
                return None
            self._holders = {address: one for address, one in self._holders.items() if not one.is_over}
            self._holders[where.address] = Holder(where, self._deliver, self._lost)
        return self._holders[where.address]

    def path_of(self, digest: str) -> Path:
        """Return the path of a blob."""
        return blob_folder(self._folder, digest)

    def folder_of(self, digest: str) -> Path:
        """Return the folder with the files of a blob, which may still be arriving."""
        writer = self._writers.get(digest)
        return writer.root if writer is not None and writer.is_early else self.path_of(digest)

    def close(self) -> None:
        """Fetch and serve no more; a process that still waits for a file gets an error."""
        self._is_closed.set()
        with self._lock:
            self._wanted = []
            server, self._server = self._server, None
            holders, self._holders = list(self._holders.values()), {}
            writers, self._writers = list(self._writers.values()), {}
            if self._outbox is not None:
                self._outbox.put(None)
        for one in holders:
            one.close()
        if server is not None:
            server.close()
        for writer in writers:
            if writer.is_early and writer.missing is not None and not writer.missing:
                with suppress(OSError):  # it is fetched again when it is needed
                    writer.finish()
            writer.close()

    @property
    def _writer(self) -> StoredBlob:
        return self._writers[self._wanted[0]]

    def _begin(self) -> None:
        """Ask for the head of the next blob."""
        self._requested, self._order, self._direct = {}, [], []
        if self._wanted:
            digest = self._wanted[0]
            if digest in self._complete:
                self._writers[digest] = StoredBlob(digest, self.path_of(digest))
            else:
                self._writers[digest] = BlobWriter(digest, self._folder, is_early=digest == self._early)
            self._ask_for_head()

    def _ask_for_head(self) -> None:
        """Ask for the next bytes of the head. The first ones are the whole of a short blob, as code mostly is."""
        done = len(self._writer.head.data)
        num_bytes = CHUNK_BYTES if done else FIRST_BYTES
        self._say(FetchBlob(digest=self._wanted[0], offset=done, num_bytes=num_bytes, is_direct=True))

    def _take_head(self, writer: StoredBlob, chunk: BlobChunk, data: memoryview) -> None:
        """Take bytes of the head; when it is complete, choose the order of the pieces."""
        if chunk.offset != len(writer.head.data):
            return
        writer.add_head(data)
        if writer.missing is None:
            if not data:
                raise InvalidFile(f"blob {chunk.digest[:12]} ends within its head")
            self._ask_for_head()
            return
        self._order, self._began, self._num_sent = sorted(writer.missing), time.monotonic(), 0
        if chunk.total >= SHARED_BYTES and self._open_server is not None:
            Random().shuffle(self._order)
            self._serve(self._open_server)
        if writer.is_early and writer.missing:
            threading.Thread(target=self._watch, args=(writer,), name="evener-wanted", daemon=True).start()

    def _watch(self, writer: StoredBlob) -> None:
        """Fetch first what processes wait for."""
        wanted, active = Wanted(writer.root), time.monotonic()
        while writer.missing and not self._is_closed.wait(_PAUSES[time.monotonic() - active > _ACTIVE_SECONDS]):
            for path in wanted.new():
                active = time.monotonic()
                with self._lock:
                    self._prioritise(writer.pieces_of(path))
            with self._lock:
                self._ask_again()

    def _ask_again(self) -> None:
        """Ask the master for pieces that a process needs and another node has not sent in time."""
        now = time.monotonic()
        late = [piece for piece, since in self._prioritised.items() if now - since > _URGENT_SECONDS]
        for piece in late:
            self._prioritised[piece] = now
            if piece not in self._requested:
                self._direct.append(piece)
        if late:
            self._fill()

    def _prioritise(self, pieces: set[int]) -> None:
        """Fetch these pieces first."""
        if not self._wanted:  # it has ended meanwhile
            return
        for piece in sorted(pieces - self._prioritised.keys()):
            self._prioritised[piece] = time.monotonic()
            offset = self._writer.head.offset_of(piece)
            if piece not in self._requested and not any(one.prioritise(offset) for one in self._holders.values()):
                self._urgent.append(piece)
        self._fill()

    def _serve(self, open_server: Serve) -> None:
        """Serve pieces to other nodes, if that is possible here."""
        if self._server is None:
            try:
                self._server = open_server(self._read)
            except EvenerError:
                self._open_server = None  # the master sends all pieces to all
                return
        self._offer(self._server)

    def _offer(self, server: PieceServer) -> None:
        self._say(replace(server.offer, complete=tuple(self._complete[:MAX_COMPLETE])))

    def _read(self, fetch: FetchBlob) -> tuple[BlobChunk, bytes] | None:
        """Return the piece that another node requests; see `Reads`."""
        with self._lock:
            writer = self._writers.get(fetch.digest)
            none = BlobChunk(digest=fetch.digest, offset=fetch.offset, total=0), b""
            if writer is None or writer.missing is None:
                return none
            if (piece := writer.head.piece_at(fetch.offset)) < 0:
                return none
            try:
                data = writer.read(piece)
            except MissingFile:
                return none
            if data is None:
                is_on_its_way = self._wanted[:1] == [fetch.digest] and piece in self._requested
                return None if is_on_its_way else none
            total = writer.head.num_bytes + writer.head.contents_bytes
            return BlobChunk(digest=fetch.digest, offset=fetch.offset, total=total), data

    def _deliver(self, chunk: BlobChunk, data: memoryview) -> None:
        """Take a piece that another node sends. Raises InvalidFile: it is damaged."""
        with self._lock:
            if not self._wanted or chunk.digest != self._wanted[0] or self._writer.missing is None:
                return
            try:
                self._writer.add(self._piece_at(chunk.offset), data)
            except OSError as error:
                self._failure = error
            self._prioritised.pop(self._piece_at(chunk.offset), None)
            if self._failure is not None or not self._writer.missing:
                self._wake()
            else:
                self._fill()

    def _lost(self, unanswered: list[FetchBlob]) -> None:
        """Ask the master for the pieces that another node does not send any more."""
        with self._lock:
            if self._wanted:
                self._direct += [self._piece_at(one.offset) for one in unanswered if one.digest == self._wanted[0]]
                self._fill()

    def _piece_at(self, offset: int) -> int:
        return self._writer.head.piece_at(offset)

    def _fill(self) -> None:
        """Ask the master for the next pieces."""
        missing = self._writer.missing if self._wanted else None
        ahead = _EARLY_AHEAD if self._wanted and self._writer.is_early else AHEAD
        while missing and len(self._requested) < (AHEAD if self._urgent else ahead):
            is_direct = bool(self._direct) and not self._urgent
            if self._urgent:
                piece = self._urgent.popleft()
            elif self._prioritised and not self._direct:
                return  # the line is for the pieces that a process waits for
            elif self._direct or self._order:
                piece = (self._direct or self._order).pop()
            elif (taken := self._taken_back()) is not None:
                piece, is_direct = taken, True
            else:
                return
            if piece in missing and piece not in self._requested:
                head = self._writer.head
                offset, num_bytes = head.offset_of(piece), head.length_of(piece)
                fetch = FetchBlob(digest=self._wanted[0], offset=offset, num_bytes=num_bytes, is_direct=is_direct)
                self._requested[piece] = fetch
                self._say(fetch)

    def _taken_back(self) -> int | None:
        """Return a piece that a slow node would send last; None if there is none."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate, most = self._num_sent / seconds, _BACKLOG_SECONDS + _BACKLOG_SHARE * seconds
        for holder in self._holders.values():
            is_slow = holder.rate * _SLOW < rate or holder.backlog_seconds > most
            if is_slow and (fetch := holder.give_back()) is not None:
                return self._piece_at(fetch.offset)
        return None

    def _wake(self) -> None:
        """Wake the thread that handles the master's messages: ask for the end of the blob, which is empty."""
        head = self._writer.head
        self._say(FetchBlob(digest=self._wanted[0], offset=head.num_bytes + head.contents_bytes, is_direct=True))

    def _say(self, header: Header) -> None:
        """Send a message; other threads let one thread send, since that may wait for the master to return."""
        if threading.current_thread() is self._owner:
            with suppress(CannotJoin, ConnectionLost):  # which is noticed where messages are received
                self._send(header)
            return
        if self._outbox is None:
            self._outbox = SimpleQueue()
            threading.Thread(target=self._send_all, args=(self._outbox,), name="evener-fetch", daemon=True).start()
        self._outbox.put(header)

    def _send_all(self, outbox: SimpleQueue[Header | None]) -> None:
        while (header := outbox.get()) is not None:
            with suppress(CannotJoin, ConnectionLost):
                self._send(header)


def _has_bytes(folder: Path, least: int) -> bool:
    """Return whether the files in a folder have at least so many bytes."""
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has been removed
                num_bytes += os.stat(os.path.join(place, name)).st_size
            if num_bytes >= least:
                return True
    return False
