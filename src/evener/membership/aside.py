"""What two ranks of a generation do besides what all do: in a thread of each, over a connection of their own.

    one of them      aside = ranks.aside(0, 2, give)      ->  give(mesh, inbox), in a thread
    the other        aside = ranks.aside(0, 2, take)      ->  take(mesh, inbox), in a thread
                     aside.wait_for(lambda: ...)              what the thread has come to, with `aside.changed`

Nobody else waits for it. It ends with the generation, whatever it is doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from evener.comm.mesh import Mesh

Inbox: TypeAlias = "SimpleQueue[bytes | None]"
"""What the main thread has the work know; None: there will be no more."""


class Aside:
    """One rank's side of it.

    Args:
        join: connects the two; returns a mesh of these ranks alone, the first of which has rank 0.
        work: called in the thread with the mesh; when it returns, the connection is closed.

    Attributes:
        changed: notified when it ends; held and notified by the work whenever there is news.
        inbox: see above.
        error: why it ended before it was done; None while all is well.
    """

    def __init__(self, join: Callable[[], Mesh], work: Callable[[Mesh, Inbox], None]) -> None:
        self.changed = threading.Condition()
        self.inbox: Inbox = SimpleQueue()
        self.error: Exception | None = None
        self._join, self._work = join, work
        self._mesh: Mesh | None = None
        threading.Thread(target=self._run, name="evener-elastic-aside", daemon=True).start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds, which the work brings about. Raises the error for which it never will."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.error is not None)
            if self.error is not None and not condition():
                raise self.error

    def abort(self, error: Exception) -> None:
        """End it; from any thread."""
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
                    self._work(mesh, self.inbox)
            finally:
                mesh.close()
        except Exception as error:  # whoever waits for the work raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
