"""Offers the newest checkpoint of a node's rank to the master, and sends it.

    the rank writes one -> RankSaved -> FetchBlob, RankPiece ... -> all of it is sent: the next may be offered

An offered checkpoint is linked into a folder of its own, since the rank removes old checkpoints while it writes new
ones.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from evener.ps.protocol.blob import Blob, whole_folder
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.messages import FetchBlob, Header
from evener.ps.protocol.rank_messages import RankPiece, RankSaved
from evener.records.errors import MissingFile
from evener.wire.frame import Buffer

CHECKPOINTS = "checkpoints"
"""Folder in which a rank writes its checkpoints, within the rank's folder."""
_INTERVAL_S = 5.0
"""Shortest time between two offers."""
_OFFER_TIMEOUT_S = 60.0
"""Time without a request for an offered checkpoint after which the next one is offered."""


class SendToMaster(Protocol):
    """Sends messages to the master."""

    def __call__(self, header: Header, *buffers: Buffer) -> None:
        """Send a frame."""
        ...


class CheckpointSender:
    """Sends the checkpoints of one rank's process.

    Args:
        run: name of the run.
        process: number of the process.
        folder: folder of the process.
        send: sends a frame, from any thread.
        log: shows a message to the node's user.
        clock: seconds.
    """

    def __init__(
        self,
        run: str,
        process: int,
        folder: Path,
        send: SendToMaster,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._process, self._folder, self._send, self._log = run, process, folder, send, log
        self._clock = clock
        self._lock = threading.Lock()
        self._blob: Blob | None = None
        self._is_sent = True
        self._step, self._requested_at, self._offered_at = 0, clock(), -_INTERVAL_S

    def written(self, *, is_last: bool = False) -> None:
        """Offer the newest checkpoint when the rank has written one, unless an earlier one is being sent.

        The last one of a rank that has stopped is offered in any case.
        """
        now = self._clock()
        with self._lock:
            is_under_way = not self._is_sent and now - self._requested_at < _OFFER_TIMEOUT_S
            is_early = is_under_way or now - self._offered_at < _INTERVAL_S
            is_skipped = self._step == self._newest_step() if is_last else is_early
            if is_skipped or not self._take_newest():
                return
            self._offered_at = self._requested_at = now
            self._is_sent = False
        self.offer()

    def offer(self) -> None:
        """Send the offer, also again over a new connection."""
        with self._lock:
            if self._blob is None:
                return
            header = RankSaved(run=self._run, process=self._process, step=self._step, digest=self._blob.digest)
        self._send(header)

    def give(self, fetch: FetchBlob) -> None:
        """Send the piece that the master requests; after the last one another checkpoint may be offered.

        Until then this one is offered again over every new connection: its last piece may have been lost.
        """
        with self._lock:
            blobs = () if self._blob is None else (self._blob,)
            self._requested_at = self._clock()
        chunk, data = BlobSender(blobs=blobs).chunk(fetch)
        piece = RankPiece(run=self._run, digest=chunk.digest, offset=chunk.offset, total=chunk.total)
        self._send(piece, data)
        if data and fetch.offset + fetch.num_bytes >= chunk.total:
            with self._lock:
                self._is_sent = True

    def _newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        names = [path.name.removeprefix("step-") for path in (self._folder / CHECKPOINTS).glob("step-*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _take_newest(self) -> bool:
        """Link the newest checkpoint into a folder of its own; return whether there is a complete one."""
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
            self._log(f"cannot send a checkpoint to the master: {error}")
        return self._blob is not None


def link_files(folder: Path, into: Path) -> None:
    """Link the files of `folder` into `into`; copy them where the system has no links. Raises OSError."""
    into.mkdir(parents=True)
    for file in folder.iterdir():
        try:
            os.link(file, into / file.name)
        except PermissionError:
            shutil.copyfile(file, into / file.name)
