"""A side channel: work of two ranks of a generation, in a thread of each, over a separate connection.

    one rank         channel = ranks.side_channel(0, 2, give)      ->  give(mesh, channel), in a thread
    the other        channel = ranks.side_channel(0, 2, take)      ->  take(mesh, channel), in a thread
                     channel.wait_for(lambda: ...)                     state of the thread, with `channel.changed`

The other ranks do not wait for it. It is aborted at the end of the generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from evener.comm.mesh import Mesh


class SideChannel:
    """One rank's side of a side channel.

    Args:
        join: returns a mesh of the two ranks, the first of which has rank 0.
        work: called in the thread with the mesh and this object, perhaps before the caller has it; the connection is
            closed when it returns.

    Attributes:
        changed: notified at the end, and by the work whenever its state changes.
        inbox: messages of the main thread to the work; None is the last one.
        error: error that ended the work; None without one.
    """

    def __init__(self, join: Callable[[], Mesh], work: Callable[[Mesh, SideChannel], None]) -> None:
        self.changed = threading.Condition()
        self.inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.error: Exception | None = None
        self._join, self._work = join, work
        self._mesh: Mesh | None = None
        threading.Thread(target=self._run, name="evener-elastic-side-channel", daemon=True).start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Raises the error that ended the work before."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.error is not None)
            if self.error is not None and not condition():
                raise self.error

    def abort(self, error: Exception) -> None:
        """Abort the work; from any thread."""
        self.inbox.put(None)
        self._fail(error)
        if self._mesh is not None:
            self._mesh.abort()

    def _run(self) -> None:
        try:
            mesh = self._join()
            try:
                with self.changed:
                    self._mesh = mesh
                    is_over = self.error is not None
                if not is_over:
                    self._work(mesh, self)
            finally:
                mesh.close()
        except Exception as error:  # `wait_for` raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
