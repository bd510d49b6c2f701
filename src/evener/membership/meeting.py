"""Where the ranks of a generation meet: their meshes and sums, made in a thread that may be left behind.

A rank that dies now would be waited for as long as a slow one. So the main thread waits for this one or for the news
that somebody is gone, whichever is first; a meeting that was left ends soon, and nobody uses what it made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.comm.rank_lines import RankLines
from evener.comm.signed_store import SignedStore
from evener.membership.generation import Generation
from evener.records.errors import NodeLost

LONGEST_WAIT = 1800.0
"""Seconds: slow is not dead."""


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Of one rank to the others of its generation; empty where there are none.

    Attributes:
        mesh: for small messages.
        reports: for those that are read later.
        sums: for tensors.
        lines: on which nothing is sent, by which it is known that they are cut.
    """

    mesh: Mesh | None = None
    reports: Mesh | None = None
    sums: AbortableGloo | None = None
    lines: RankLines | None = None

    def abort(self, error: Exception) -> None:
        """From now on whoever waits for another rank raises; from any thread."""
        for mesh in (self.mesh, self.reports):
            if mesh is not None:
                mesh.abort()
        if self.sums is not None:
            self.sums.abort(error)

    @property
    def is_broken(self) -> bool:
        """Whether a sum failed, or was given up."""
        return self.sums is not None and self.sums.has_failed

    def has_ended(self) -> bool:
        """Whether nothing of what was aborted is under way any more; closes it, which then does not block."""
        if self.sums is not None and not self.sums.let_go():
            return False
        for one in (self.mesh, self.reports, self.lines):
            if one is not None:
                one.close()
        return True


class Meeting:
    """The ranks of one generation come together, in a thread.

    Args:
        generation: whose ranks.
        rank: of this process.
        open_store: a connection of its own to the store that all share.
        address: of this machine, at which the other ranks reach it.
        changed: notified when it has ended.
        patience: seconds in which the machine of a rank that has come answers.

    Attributes:
        connections: once all have come; None before, or if that failed.
        error: why it failed.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        open_store: Callable[[], SignedStore],
        address: str,
        changed: threading.Condition,
        patience: float = LONGEST_WAIT,
    ) -> None:
        self._generation, self._rank, self._open_store = generation, rank, open_store
        self._address, self._patience, self._changed = address, patience, changed
        self.connections: Connections | None = None
        self.error: Exception | None = None
        self._is_left = False
        threading.Thread(target=self._run, name="evener-elastic-meeting", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether all have come, or it failed."""
        return self.connections is not None or self.error is not None

    def leave(self) -> None:
        """Wait for it no more, holding the lock of `changed`; nothing happens if all have come already.

        It ends soon, and connections that still come of it are closed.
        """
        self._is_left = self.connections is None

    def _run(self) -> None:
        found: Connections | None = None
        try:
            found = self._meet()
        except (RuntimeError, NodeLost) as error:
            self.error = error
        with self._changed:
            if found is not None and self._is_left:
                found.abort(NodeLost("this generation is over"))
                found.has_ended()  # nothing was ever under way
            else:
                self.connections = found
            self._changed.notify_all()

    def _meet(self) -> Connections:
        size = len(self._generation.participants)
        if size == 1:
            return Connections()
        store = self._open_store().until(lambda: self._is_left).under(f"generation/{self._generation.number}")
        store.set_timeout(timedelta(seconds=LONGEST_WAIT))
        join = partial(
            join_mesh,
            rank=self._rank,
            nodes=self._generation.nodes,
            address=self._address,
            patience=LONGEST_WAIT,
            longest_wait=LONGEST_WAIT,
            connect_seconds=self._patience,
        )
        with ExitStack() as undo:
            meshes = []
            for name in ("small", "reports", "lines"):
                meshes.append(join(store=store.under(name)))
                undo.callback(meshes[-1].close)
            mesh, reports, idle = meshes
            place = GlooPlace(store=store.under("gloo"), rank=self._rank, size=size, longest_wait=LONGEST_WAIT)
            sums, lines = AbortableGloo(place.join(), place), RankLines(idle, self._patience)
            found = Connections(mesh=mesh, reports=reports, sums=sums, lines=lines)
            undo.pop_all()
        return found
