"""The checkpoints of a run whose ranks work together, at the master: fetched from the node that has them.

    RankSaved    -> FetchBlob: a few pieces at a time, as the node sends beats over the same line
    RankPiece    -> ... until all of it is here
    a thread has the disk take it; then it is the one to go on from, if no rank is left

The one before is kept until then. The master never looks into them: nodes do that, which read no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from evener.ps.master.collective.rank_journal import Saved
from evener.ps.master.nodes import NodeRecord
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
from evener.ps.protocol.blob_transfer import BlobReceiver
from evener.ps.protocol.messages import BlobChunk, FetchBlob, Send
from evener.ps.protocol.rank_messages import RankPiece, RankSaved
from evener.records.errors import EvenerError
from evener.system.memory import usable_memory

_AHEAD = 2
_SHARE = 0.5
"""Of the disk's free bytes, that one may take: nobody knows how large it is to be, and two are kept for a while."""
_WEIGHTS = "model.safetensors"


class RankCheckpoints:
    """See the first lines; close it.

    Args:
        blobs: folder of blobs.
        send: to connections.
        keep: called with every one that has come.
        notify: tells the master's user.

    Attributes:
        last: that is here; that of step 0 stands for none.
    """

    def __init__(
        self,
        blobs: Path,
        send: Send,
        keep: Callable[[Saved], None],
        notify: Callable[[str], None],
    ) -> None:
        self._send, self._keep, self._notify = send, keep, notify
        self._receiver = BlobReceiver(blobs, partial(StreamWriter, is_synced=False, share=_SHARE), _AHEAD)
        self._from: NodeRecord | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evener-checkpoints")
        self._syncing: Future[None] | None = None
        self._coming = self.last = Saved(step=0, digest="")

    def offered(self, node: NodeRecord, header: RankSaved) -> None:
        """A node that takes part has one; it is fetched, instead of one that is on its way: its rank leads now."""
        offered = Saved(step=header.step, digest=header.digest)
        is_there = self._receiver.path_of(header.digest).exists()  # no checkpoint then, but code, which stays
        if self._from is node and offered == self._coming:
            self._ask(self._receiver.resume())  # over a new connection
        elif not self.is_busy and header.step > self.last.step and not is_there:
            self._from, self._coming = node, offered
            self._fetch(lambda: self._receiver.request([header.digest]))

    def piece(self, node: NodeRecord, header: RankPiece, data: memoryview) -> None:
        """A piece of it came."""
        if node is self._from and header.digest == self._coming.digest:
            chunk = BlobChunk(digest=header.digest, offset=header.offset, total=header.total)
            self._fetch(lambda: self._receiver.receive(chunk, data))

    def left(self, node: NodeRecord) -> None:
        """A node is gone."""
        if node is self._from:
            self._give_up()

    @property
    def is_busy(self) -> bool:
        """Whether the disk is to take one that came."""
        return self._syncing is not None

    def tick(self) -> None:
        """Take the one that came for the last, once the disk has it."""
        if self._syncing is None or not self._syncing.done():
            return
        error, self._syncing = self._syncing.exception(), None
        if error is not None:
            self._notify(f"warning: the checkpoint of step {self._coming.step} is not kept: {error}")
            return
        before, self.last = self.last, self._coming
        self._keep(self.last)
        if before.step and before.digest != self.last.digest:
            self._receiver.path_of(before.digest).unlink(missing_ok=True)

    def weights(self) -> bytes:
        """Of the last one, a safetensors file; empty if there is none, or it cannot be read."""
        if not self.last.step:
            return b""
        try:
            return BlobStream(self._receiver.path_of(self.last.digest), self.last.digest).file(
                _WEIGHTS, usable_memory()[1] // 2
            )
        except EvenerError as error:
            self._notify(f"warning: {error}")
            return b""

    def close(self) -> None:
        """The master ends; what is here stays."""
        self._give_up()
        self._thread.shutdown()

    def forget(self) -> None:
        """The run is over, and nobody goes on from them any more."""
        self.close()
        for one in (self.last, self._coming):
            if one.step:
                self._receiver.path_of(one.digest).unlink(missing_ok=True)

    def _fetch(self, action: Callable[[], Sequence[FetchBlob]]) -> None:
        """Go on with fetching."""
        try:
            self._ask(action())
        except (EvenerError, OSError) as error:
            self._notify(f"warning: the checkpoint of step {self._coming.step} is not kept: {error}")
            self._give_up()
            return
        if self._receiver.is_complete:
            self._give_up()
            self._syncing = self._thread.submit(_sync, self._receiver.path_of(self._coming.digest))

    def _ask(self, fetches: Sequence[FetchBlob]) -> None:
        assert self._from is not None
        for fetch in fetches:
            self._send(self._from.peer, fetch)

    def _give_up(self) -> None:
        self._from = None
        self._receiver.close()


def _sync(path: Path) -> None:
    """Return when the disk has the file. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
