"""Writing of checkpoints in the background: a step waits while its weights are copied, not for the disk.

A full or missing disk does not end a run: it is an event, and the next checkpoint tries again.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from safetensors import SafetensorError

from evener.records.errors import first_line
from evener.records.record import Event
from evener.training.checkpoint import Checkpoint, Checkpoints

_MAX_PENDING = 2
"""Copies of a checkpoint in memory: one that is written, and one that waits."""


class CheckpointWriter:
    """Writes checkpoints in a thread, in order; a context manager, which waits at the end until all are written.

    Args:
        checkpoints: the folder to write to.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writing: deque[Future[Event]] = deque()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` soon; returns at once, unless checkpoints come faster than the disk takes them."""
        under_way = [future for future in self._writing if not future.done()]
        if len(under_way) == _MAX_PENDING:
            wait(under_way[:1])
        self._writing.append(self._thread.submit(self._write, checkpoint))

    def finished(self) -> list[Event]:
        """Return events for the checkpoints that were written, or failed, since the last call; do not wait."""
        events = []
        while self._writing and self._writing[0].done():
            events.append(self._writing.popleft().result())
        return events

    def wait(self) -> list[Event]:
        """Wait for all submitted checkpoints; return events for those that were written or failed."""
        wait(self._writing)
        return self.finished()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wait()
        self._thread.shutdown()

    def _write(self, checkpoint: Checkpoint) -> Event:
        step = checkpoint.state.step
        try:
            return Event(step=step, kind="checkpoint", message=f"wrote {self._checkpoints.write(checkpoint)}")
        except (OSError, SafetensorError) as error:
            return Event(step=step, kind="no checkpoint", message=self._warning(step, error))

    def _warning(self, step: int, error: Exception) -> str:
        checkpoints = self._checkpoints
        last = "there is none yet" if checkpoints.is_empty else f"the last good one is {checkpoints.latest()[0]}"
        return f"cannot write the checkpoint of step {step} in {checkpoints.folder}: {first_line(error)}; {last}"
