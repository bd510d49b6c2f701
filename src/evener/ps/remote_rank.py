"""A rank's process on a node, as the authority of its run sees it: `elastic.elastic_ranks.RankProcess`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evener.errors import EvenerError, Interrupted, NodeLost, error_of
from evener.ps.messages import Header
from evener.ps.rank_messages import RankEnded, RankTold, StopRank
from evener.wire.frame import Buffer


@dataclass(frozen=True)
class RemoteFailure:
    """How a process says that it failed."""

    is_own: bool
    exit_code: int
    sentence: str


@dataclass(eq=False)
class RemoteRank:
    """One process.

    Attributes:
        run: that it belongs to.
        node: name of the one that it stands for.
        number: of the process.
        peer: connection over which it was started, or last known to be there.
        send: to the node, if that is there.
        said: to the authority, and not yet read by it.
        ended: what its node said of its end.
        lost: why it counts as gone, though nobody said that it ended; empty while it does not.
        is_unwanted: whether its node was told to end it.
    """

    run: str
    node: str
    number: int
    peer: int | None
    send: Callable[[str, Header, Sequence[Buffer]], None]
    said: deque[bytes] = field(default_factory=deque)
    ended: RankEnded | None = None
    lost: str = ""
    is_unwanted: bool = False

    @property
    def has_finished(self) -> bool:
        """Whether it said that its work is done."""
        return self.ended is not None and self.ended.has_finished

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, or nobody will hear of it again."""
        return self.ended is not None or bool(self.lost)

    @property
    def is_silent(self) -> bool:
        """Whether all that it said has been read: what it said came before its end."""
        return self.has_ended

    @property
    def failure(self) -> RemoteFailure | None:
        """How it failed; None if it did not say so."""
        if self.ended is None or not self.ended.exit_code or self.ended.has_finished:
            return None
        return RemoteFailure(self.ended.is_own, self.ended.exit_code, self.ended.sentence)

    @property
    def has_failed(self) -> bool:
        """Whether it said so, or ended without a word."""
        return self.failure is not None or (self.has_ended and not self.has_finished)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return self.ended.ending if self.ended is not None else self.lost

    def tell(self, data: bytes) -> None:
        """Let the process hear the authority's words; one that has ended hears nothing."""
        if not self.has_ended:
            self.send(self.node, RankTold(run=self.run, process=self.number), (data,))

    def request_stop(self, *, at_once: bool) -> None:
        """Have it end after its step, or at once."""
        if self.ended is None:
            self.send(self.node, StopRank(run=self.run, process=self.number, at_once=at_once), ())


def why_ended(failed: Sequence[RemoteRank], stopping: EvenerError | None) -> EvenerError | None:
    """What explains the end of a run best: an own failure, that it was to stop, a death, then a lost connection.

    Args:
        failed: the ranks with which the run fails.
        stopping: why it was asked to stop; None if it was not.
    """
    told = [rank.failure for rank in failed if rank.failure is not None]
    own = [one for one in told if one.is_own and one.exit_code != Interrupted.exit_code]
    if own:
        return error_of(own[0].sentence, own[0].exit_code)
    if stopping is not None:
        return stopping
    for rank in failed:
        if rank.failure is None:
            return NodeLost(f"node {rank.node} {rank.ending}")
    return error_of(told[0].sentence, told[0].exit_code) if told else None
