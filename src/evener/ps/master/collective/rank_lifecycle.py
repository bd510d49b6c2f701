"""When a run whose ranks work together begins, on which nodes, whether it begins again, and how it ends.

all who are here are ready                                -> it begins with them
one has waited for the others for the patience            -> it begins with those who are ready
nobody is left, before the first step or without a
later checkpoint                                          -> it begins again from where it began, three times at most;
                                                             at once if as many nodes as before are here, else after
                                                             the patience
it has begun so three times, before the first step        -> it begins again without the nodes that were lost last
nobody is left, and there is a checkpoint of a later step
than it began from                                        -> it begins again from that, as above; at once if as many
                                                             nodes as before are here
fewer than before cannot go on from that                  -> it begins again when as many are here
every rank that is needed has ended                       -> it is over
one of them failed by itself                              -> the others have a second to end, too, and say why
it was to stop                                            -> they have the patience to end after their step
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from evener.membership.elastic_ranks import ElasticRanks
from evener.ps.master.collective.remote_rank import RemoteRank, why_ended
from evener.ps.master.nodes import NodeRecord, Nodes
from evener.records.errors import DoesNotFit, EvenerError, InvalidInput, NodeLost, NoUsableNode, TrainingFailed

_MOST = 3


class Beginnings:
    """Of one run.

    Args:
        nodes: all nodes.
        run: its name.

    Attributes:
        step: of the checkpoint that it began from last; 0 for none.
    """

    def __init__(self, nodes: Nodes, run: str) -> None:
        self._nodes, self._run = nodes, run
        self._number, self._expected = 0, 0
        self._first_ready, self._needs_all = inf, False
        self._first_loss: EvenerError | None = None
        self.step = 0

    def resume(self) -> None:
        """It had begun under another master, once at least."""
        self._number = 1

    def ready(self, now: float) -> None:
        """A node is ready."""
        self._first_ready = min(self._first_ready, now)

    def founders(self, now: float) -> list[NodeRecord]:
        """The nodes that it begins on now; nobody yet while some are awaited.

        Raises:
            NoUsableNode: nobody who is here can take part.
        """
        is_late = now - self._first_ready > self._nodes.patience
        found = founders_of(self._nodes.present, self._run, is_late=is_late)
        return found if (is_late and not self._needs_all) or len(found) >= self._expected else []

    def begins(self) -> None:
        """It begins."""
        self._number += 1

    def again(self, error: EvenerError, saved: int, now: float, *, has_begun: bool, before: int, able: int) -> str:
        """From where it begins again after `error`, in words; empty if it does not.

        Args:
            error: that ended it.
            saved: step of the last checkpoint; 0 for none.
            now: the time.
            has_begun: whether a step may have been made.
            before: ranks that it had.
            able: those of them whose nodes can take part.
        """
        if not isinstance(error, NodeLost):
            return "" if has_begun else self._with_all(before)
        if has_begun and (words := self.from_checkpoint(saved, before)):
            return words
        if self._number < _MOST:
            return self._from_the_same(now, able, has_begun=has_begun)
        return self.from_checkpoint(saved, before)

    def without(self, error: EvenerError, now: float, others: int) -> str:
        """From where the `others` begin again without the nodes that `error` names; empty if there are none.

        That is where it began; it has begun there as often as it may with all nodes.
        """
        self._first_loss = self._first_loss or error
        return self._from_the_same(now, others, has_begun=False) if others else ""

    def explained(self, error: EvenerError) -> EvenerError:
        """Return `error`; or, where too few nodes are left for what was asked, the loss that made them so few."""
        is_of_few = isinstance(error, InvalidInput | DoesNotFit)
        return self._first_loss if self._first_loss is not None and is_of_few else error

    def _from_the_same(self, now: float, expected: int, *, has_begun: bool) -> str:
        self._first_ready, self._expected = now, expected
        if not has_begun:
            return "before the first step"
        return f"from the checkpoint of step {self.step}, as before:" if self.step else "from the first step:"

    def from_checkpoint(self, saved: int, expected: int) -> str:
        """From where it begins again, in words, if the checkpoint of step `saved` is new; empty if it does not.

        It waits for `expected` nodes for the patience.
        """
        if saved <= self.step:
            return ""
        self.step, self._number, self._expected = saved, 0, expected
        self._first_ready, self._needs_all = inf, False
        return f"from the checkpoint of step {saved}, with whoever comes:"

    def _with_all(self, before: int) -> str:
        """As `again`, after an error that is no loss: fewer nodes than the run had may be too few for its division."""
        if before >= self._expected:
            return ""
        self._needs_all, self._number = True, 0
        return f"when {self._expected} nodes are here, as {before} cannot go on:"


def founders_of(present: Sequence[NodeRecord], run: str, *, is_late: bool) -> list[NodeRecord]:
    """The nodes that a run begins on: all who are here, once they are ready; nobody yet while some are awaited.

    Those who have joined and still measure themselves are awaited, too.

    Args:
        present: nodes that are here.
        run: its name.
        is_late: whether those who are ready have waited for the others for long enough.

    Raises:
        NoUsableNode: nobody of them can take part.
    """
    measured = [node for node in present if node.profile is not None]
    able = [node for node in measured if run not in node.not_ready]
    ready = [node for node in able if node.ready == run]
    if measured and not able:
        reasons = "; ".join(f"node {node.name} {node.doing}" for node in measured)
        raise NoUsableNode(f"no node can take part in the run: {reasons}")
    is_complete = len(ready) == len(able) and len(measured) == len(present)
    return ready if is_late or is_complete else []


_GRACE = 1.0


class RunEnding:
    """Of one run.

    Args:
        patience: see above.

    Attributes:
        reason: why it is to stop; None while it is not.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._deadline = patience, inf
        self.reason: EvenerError | None = None

    def stop(self, error: EvenerError, now: float) -> bool:
        """It is to stop because of `error`; whether it was not before."""
        if self.reason is not None:
            return False
        self.reason, self._deadline = error, now + self._patience
        return True

    def is_over(self, elastic: ElasticRanks[RemoteRank], ranks: Sequence[RemoteRank], now: float) -> bool:
        """Whether nobody is left who is waited for."""
        if self._deadline == inf and any(map(elastic.ends_the_run, ranks)):
            self._deadline = now + _GRACE
        return now > self._deadline or all(rank.has_ended for rank in ranks if elastic.is_needed(rank))

    def error(
        self, elastic: ElasticRanks[RemoteRank], ranks: Sequence[RemoteRank], *, has_record: bool
    ) -> EvenerError | None:
        """Why it ended before it was complete; None if it was."""
        error = why_ended([rank for rank in ranks if elastic.ends_the_run(rank)], self.reason, len(ranks))
        return error or (None if has_record else TrainingFailed("the run ended without a record"))

    def begins_again(self) -> None:
        """The ranks that failed are gone."""
        self._deadline = inf
