"""The rendezvous of the ranks of a generation: meshes and sums, made in a thread that the rank can abandon.

A rank that dies during the rendezvous looks like a slow one. So the main thread waits for this thread or for the news
of a lost rank, whichever is first. An abandoned rendezvous ends soon, and its connections are closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.mesh import Mesh
from evener.comm.mesh_joining import join_mesh
from evener.comm.peer_lines import PeerLines
from evener.comm.signed_store import SignedStore
from evener.membership.generation import Generation
from evener.records.errors import NodeLost
from evener.system import accelerators

LONGEST_WAIT = 1800.0
"""Timeout in seconds; a slow rank is not lost."""


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The connections of one rank to the others of its generation; empty for a single rank.

    Attributes:
        mesh: for small messages.
        reports: for messages that are read later.
        sums: for tensors.
        lines: idle connections that detect a broken link.
    """

    mesh: Mesh | None = None
    reports: Mesh | None = None
    sums: AbortableGloo | None = None
    lines: PeerLines | None = None

    def abort(self, error: Exception) -> None:
        """Raise in all current and later waits for another rank; from any thread."""
        for mesh in (self.mesh, self.reports):
            if mesh is not None:
                mesh.abort()
        if self.sums is not None:
            self.sums.abort(error)

    @property
    def is_broken(self) -> bool:
        """Whether a sum failed or was aborted."""
        return self.sums is not None and self.sums.has_failed

    def has_ended(self) -> bool:
        """Whether all aborted operations have ended; if so, close the connections, which then does not block."""
        if self.sums is not None and not self.sums.let_go():
            return False
        for one in (self.mesh, self.reports, self.lines):
            if one is not None:
                one.close()
        return True


class Rendezvous:
    """The ranks of one generation come together, in a thread.

    Args:
        generation: whose ranks.
        rank: of this process.
        open_store: opens a connection to the rendezvous store.
        address: of this machine, at which the other ranks reach it.
        changed: notified at the end.
        patience: timeout of a connection to a rank that has joined, in seconds.
        device: of this rank.

    Attributes:
        connections: of all ranks; None before the end, or after a failure.
        error: error of the rendezvous; None without one.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        open_store: Callable[[], SignedStore],
        address: str,
        changed: threading.Condition,
        patience: float = LONGEST_WAIT,
        device: torch.device = accelerators.CPU,
    ) -> None:
        self._generation, self._rank, self._open_store = generation, rank, open_store
        self._address, self._patience, self._changed, self._device = address, patience, changed, device
        self.connections: Connections | None = None
        self.error: Exception | None = None
        self._is_left = False
        threading.Thread(target=self._run, name="evener-elastic-rendezvous", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have connected, or it failed."""
        return self.connections is not None or self.error is not None

    def leave(self) -> None:
        """Abandon the rendezvous, holding the lock of `changed`; without effect if all ranks have connected.

        It ends soon and closes its connections.
        """
        self._is_left = self.connections is None

    def _run(self) -> None:
        connections: Connections | None = None
        try:
            connections = self._meet()
        except (RuntimeError, NodeLost) as error:
            self.error = error
        with self._changed:
            if connections is not None and self._is_left:
                connections.abort(NodeLost("this generation is over"))
                connections.has_ended()  # no operation was under way
            else:
                self.connections = connections
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
            own = b"staged" if accelerators.is_accelerator(self._device) else b""
            place = GlooPlace(
                store=store.under("gloo"),
                rank=self._rank,
                size=size,
                longest_wait=LONGEST_WAIT,
                is_staged=any(mesh.all_gather(own)),
            )
            sums, lines = AbortableGloo(place.join(), place), PeerLines(idle, self._patience)
            connections = Connections(mesh=mesh, reports=reports, sums=sums, lines=lines)
            undo.pop_all()
        return connections
