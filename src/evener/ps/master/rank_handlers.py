"""The master's handlers for messages of nodes that have ranks of the run in progress."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.ps.master.access.quotas import MAX_BUFFER_BYTES
from evener.ps.master.nodes import NodeRecord
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol.messages import Header
from evener.ps.protocol.rank_messages import RankEnded, RankPiece, RankReady, RankSaid, RankSaved, RankShown
from evener.records.errors import InvalidInput
from evener.system.memory import usable_memory
from evener.wire.errors import BadFrame
from evener.wire.frame import Buffer, allocate


class RankHandlers:
    """Handlers of messages about ranks.

    Args:
        scheduler: runs of the master.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def is_wanted(self, node: NodeRecord | None, header: Header, lengths: tuple[int, ...]) -> bool:
        """Return whether a process's message belongs to the run in progress, and is not too long."""
        run = self._scheduler.ranks_of(getattr(header, "run", ""))
        if node is None or run is None or not run.job.takes(node.name):
            return False
        process = getattr(header, "process", None)
        return process is None or not lengths or run.wants(node, process, sum(lengths))

    def place_weights(
        self, node: NodeRecord | None, header: RankEnded, lengths: tuple[int, ...]
    ) -> Sequence[Buffer] | None:
        """Return memory for the weights of an ended process; None if not needed, or too large, which ends the run.

        Raises:
            BadFrame: there is no room for them now, or they are several.
        """
        if len(lengths) != 1:
            raise BadFrame(f"an ended process has one file of weights, got {len(lengths)}")
        run = self._scheduler.ranks_of(header.run)
        room = min(usable_memory()[1] // 2, self._scheduler.free_bytes)
        if node is None or run is None or not run.wants_weights(node, header.process, lengths[0], room):
            return None
        return allocate(header, lengths)

    def on_message(self, node: NodeRecord, header: Header, buffers: Sequence[memoryview]) -> None:
        """Handle a node's message about its rank. Raises BadFrame: the message is not valid."""
        run = self._scheduler.ranks_of(getattr(header, "run", ""))
        if run is None or not run.job.takes(node.name):
            return
        if type(header) in MAX_BUFFER_BYTES and not buffers:  # its buffers were not needed
            return
        try:
            if isinstance(header, RankReady):
                run.ready(node, header)
            elif isinstance(header, RankSaid):
                run.said(node, header.process, bytes(buffers[0]))
            elif isinstance(header, RankShown):
                run.shown(node, header.process, buffers[0])
            elif isinstance(header, RankSaved):
                run.saved(node, header)
            elif isinstance(header, RankPiece):
                run.checkpoints.piece(node, header, buffers[0])
            elif isinstance(header, RankEnded):
                run.ended(node, header, buffers)
        except (msgspec.DecodeError, InvalidInput, IndexError) as error:
            raise BadFrame(f"{type(header).__name__} cannot be understood: {error}") from error
