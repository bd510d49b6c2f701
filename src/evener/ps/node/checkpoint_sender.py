"""A node's part in keeping checkpoints at the master: it offers the newest that its rank has written, and gives it.

    the rank writes one -> RankSaved -> FetchBlob, RankPiece ... -> all of it is there: the next newest may be offered

What is offered is linked to a folder of its own, since the rank removes old checkpoints while new ones come.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from evener.ps.protocol.blob import CHUNK_BYTES, Blob, whole_folder
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.messages import FetchBlob
from evener.ps.protocol.rank_messages import RankPiece, RankSaved
from evener.records.errors import MissingFile

CHECKPOINTS = "checkpoints"
"""In the folder of a rank, which writes them there."""
_PAUSE = 5.0
"""Seconds between two offers at least."""
_FORGOTTEN = 60.0
"""Seconds after which a master that does not ask for what was offered is offered the next."""


class CheckpointSender:
    """Of one rank's process.

    Args:
        run: its run.
        process: its number.
        folder: where it may write.
        put: has a frame sent, from any thread.
        log: takes sentences for the node's user.
        clock: seconds.
    """

    def __init__(
        self,
        run: str,
        process: int,
        folder: Path,
        put: Callable[..., None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._process, self._folder, self._put, self._log = run, process, folder, put, log
        self._clock = clock
        self._lock = threading.Lock()
        self._blob: Blob | None = None
        self._step, self._asked_at, self._offered_at = 0, clock(), -_PAUSE

    def written(self) -> None:
        """The rank has written another checkpoint: offer the newest, unless an earlier one is on its way."""
        now = self._clock()
        with self._lock:
            is_under_way = self._blob is not None and now - self._asked_at < _FORGOTTEN
            if is_under_way or now - self._offered_at < _PAUSE or not self._take_newest():
                return
            self._offered_at = self._asked_at = now
        self.offer()

    def offer(self) -> None:
        """Say what there is; again, over a new connection."""
        with self._lock:
            if self._blob is None:
                return
            header = RankSaved(run=self._run, process=self._process, step=self._step, digest=self._blob.digest)
        self._put(header)

    def give(self, fetch: FetchBlob) -> None:
        """The piece that the master asks for; after the last one there is room for another checkpoint."""
        with self._lock:
            blobs = () if self._blob is None else (self._blob,)
            self._asked_at = self._clock()
        chunk, data = BlobSender(blobs=blobs).chunk(fetch)
        piece = RankPiece(run=self._run, digest=chunk.digest, offset=chunk.offset, total=chunk.total)
        self._put(piece, (data,))
        if data and fetch.offset + CHUNK_BYTES >= chunk.total:
            with self._lock:
                self._blob = None

    def _take_newest(self) -> bool:
        """Link the newest checkpoint to a folder of its own; whether there is one that is whole."""
        offered = self._folder / "offered"
        shutil.rmtree(offered, ignore_errors=True)
        try:
            newest = max((self._folder / CHECKPOINTS).glob("step-*"))
            link_files(newest, offered / newest.name)
            self._blob, self._step = Blob(offered, whole_folder(offered)), int(newest.name.removeprefix("step-"))
        except (FileNotFoundError, ValueError, MissingFile):
            self._blob = None  # the rank has removed it meanwhile: it has written newer ones
        except OSError as error:
            self._blob = None
            self._log(f"a checkpoint cannot be given to the master: {error}")
        return self._blob is not None


def link_files(folder: Path, into: Path) -> None:
    """Have the files of `folder` in `into`, too; copies where the system has no links. Raises OSError."""
    into.mkdir(parents=True)
    for file in folder.iterdir():
        try:
            os.link(file, into / file.name)
        except PermissionError:
            shutil.copyfile(file, into / file.name)
