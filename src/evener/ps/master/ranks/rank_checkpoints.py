"""Checkpoints of a run whose ranks work together: the master fetches them from the node that writes them.

    RankSaved    -> FetchBlob: a few pieces at a time, since the node sends heartbeats over the same connection
    RankPiece    -> ... until the blob is complete and on the disk: then it is the checkpoint to restart from if no
                    rank is left

The previous checkpoint is kept until then, and the one that the ranks began from as long as they train, since nodes
that join later begin from it, too. The master never reads a checkpoint; nodes do, without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from evener.ps.master.nodes import NodeRecord
from evener.ps.master.ranks.rank_journal import Saved
from evener.ps.protocol.blob_stream import BlobStream, StreamWriter
from evener.ps.protocol.blob_transfer import StreamReceiver
from evener.ps.protocol.messages import BlobChunk, FetchBlob, Send
from evener.ps.protocol.rank_messages import RankPiece, RankSaved
from evener.records.errors import EvenerError
from evener.system.memory import usable_memory

_AHEAD = 2
_SHARE = 0.5
"""Share of the free disk space that a checkpoint may take: its size is unknown before, and two are kept for a while."""
_WEIGHTS = "model.safetensors"


class RankCheckpoints:
    """The checkpoints of one run; close it.

    Args:
        blobs: folder of blobs.
        send: sends a message to a connection.
        keep: called with every checkpoint that is complete.
        notify: shows a message to the master's user.

    Attributes:
        last: last complete checkpoint; step 0 stands for none.
        base: digest of the checkpoint that the ranks began from, which nodes that join later fetch; empty for none.
    """

    def __init__(
        self,
        blobs: Path,
        send: Send,
        keep: Callable[[Saved], None],
        notify: Callable[[str], None],
    ) -> None:
        self._send, self._keep, self._notify = send, keep, notify
        self._receiver = StreamReceiver(blobs, partial(StreamWriter, share=_SHARE), _AHEAD)
        self._from: NodeRecord | None = None
        self._coming = self.last = Saved(step=0, digest="")
        self._next: tuple[NodeRecord, RankSaved] | None = None
        self.base = ""
        self._replaced: set[str] = set()

    def begin_from_last(self) -> str:
        """Let ranks begin from the last checkpoint; return its digest. `drop_previous_base` ends the previous one."""
        self._replaced.add(self.base)
        self.base = self.last.digest
        return self.base

    def drop_previous_base(self) -> None:
        """Remove the previous base, since the journal names the current one."""
        for digest in self._replaced:
            self._remove(digest)
        self._replaced.clear()

    def offered(self, node: NodeRecord, header: RankSaved) -> None:
        """Fetch a node's checkpoint; the current leader's replaces one that is being fetched from another node."""
        offered = Saved(step=header.step, digest=header.digest)
        is_there = self._receiver.path_of(header.digest).exists()  # then it is not a checkpoint but code, which stays
        if self.is_busy:
            self._next = (node, header)
        elif self._from is node and offered == self._coming:
            self._ask(self._receiver.resume())  # over a new connection
        elif header.step > self.last.step and not is_there:
            self._from, self._coming = node, offered
            self._fetch(lambda: self._receiver.request([header.digest]))

    def piece(self, node: NodeRecord, header: RankPiece, data: memoryview) -> None:
        """Take a piece of a checkpoint."""
        if node is self._from and header.digest == self._coming.digest:
            chunk = BlobChunk(digest=header.digest, offset=header.offset, total=header.total)
            self._fetch(lambda: self._receiver.receive(chunk, data))

    def disconnected(self, node: NodeRecord) -> None:
        """Stop fetching from a node that is gone."""
        if self._next is not None and node is self._next[0]:
            self._next = None
        if node is self._from:
            self._give_up()

    @property
    def is_busy(self) -> bool:
        """Whether a complete checkpoint is being written to the disk."""
        return self._receiver.is_syncing

    @property
    def is_coming(self) -> bool:
        """Whether a later checkpoint than `last` is on its way here, or is being written to the disk."""
        return self._from is not None or self.is_busy

    def tick(self) -> None:
        """Make a checkpoint the last one when it is on the disk."""
        if not self.is_busy:
            return
        try:
            self._receiver.tick()
        except OSError as error:
            self._not_saved(error)
            return
        if not self.is_busy:
            before, self.last = self.last, self._coming
            self._keep(self.last)
            self._remove(before.digest)
            if (later := self._next) is not None:
                self._next = None
                self.offered(*later)

    def weights(self) -> bytes:
        """Return the weights of the last checkpoint as a safetensors file; empty if there are none."""
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
        """Stop, and keep the files: the master ends."""
        self._give_up()

    def forget(self) -> None:
        """Stop, and remove the files: the run is over."""
        self.close()
        digests = (self.base, *self._replaced, self.last.digest, self._coming.digest)
        self.base, self.last = "", Saved(step=0, digest="")
        for digest in digests:
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        """Remove a checkpoint that is not needed any more."""
        if digest and digest not in (self.base, self.last.digest):
            self._receiver.path_of(digest).unlink(missing_ok=True)

    def _fetch(self, action: Callable[[], Sequence[FetchBlob]]) -> None:
        """Send the next requests; the node is not needed any more when its checkpoint is complete."""
        try:
            self._ask(action())
        except (EvenerError, OSError) as error:
            self._not_saved(error)
        if self.is_busy:
            self._from = None

    def _not_saved(self, error: Exception) -> None:
        self._notify(f"warning: the checkpoint of step {self._coming.step} cannot be saved: {error}")
        self._give_up()

    def _ask(self, fetches: Sequence[FetchBlob]) -> None:
        assert self._from is not None
        for fetch in fetches:
            self._send(self._from.peer, fetch)

    def _give_up(self) -> None:
        self._from = None
        self._receiver.close()
