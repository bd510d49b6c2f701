"""Start, restart and end of a run whose ranks work together.

all connected nodes are ready                             -> the run begins with them
a node has waited for the others for the patience         -> it begins with the nodes that are ready
no rank is left, before the first step or without a
later checkpoint                                          -> it restarts from where it began, three starts at most;
                                                             at once if as many nodes as before are ready, else after
                                                             the patience
three starts have ended before the first step             -> it restarts without the nodes that were lost last
no rank is left, and there is a later checkpoint than
it began from                                             -> it restarts from that, at once if as many nodes as before
                                                             are ready
fewer nodes than before cannot continue                   -> it restarts when as many are ready
every needed rank has ended                               -> it is over
a rank failed by itself                                   -> the others have a second to end, too, and report errors
the run is stopped                                        -> its ranks finish their step, validation or checkpoint;
                                                             from the end of the first, the others have the patience
it is stopped at once                                     -> it waits for no rank
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from evener.membership.rank_supervisor import RankSupervisor
from evener.ps.master.nodes import NodeRecord, Nodes, no_usable_node
from evener.ps.master.ranks.remote_rank import RemoteRank, why_ended
from evener.records.errors import DoesNotFit, EvenerError, InvalidInput, NodeLost, TrainingFailed

_MAX_STARTS = 3


class Beginnings:
    """Starts and restarts of one run.

    Args:
        nodes: all nodes.
        run: name of the run.

    Attributes:
        step: step of the checkpoint that it last began from; 0 for none.
    """

    def __init__(self, nodes: Nodes, run: str) -> None:
        self._nodes, self._run = nodes, run
        self._number, self._expected = 0, 0
        self._first_ready, self._needs_all = inf, False
        self._first_loss: EvenerError | None = None
        self.step = 0

    def resume(self, step: int) -> None:
        """Note that the run had begun under another master, from the checkpoint of `step`; 0 for none."""
        self._number, self.step = 1, step

    def ready(self, now: float) -> None:
        """Note that a node is ready."""
        self._first_ready = min(self._first_ready, now)

    def initial_nodes(self, present: Sequence[NodeRecord], now: float) -> list[NodeRecord]:
        """Return those of the run's `present` nodes that it begins on now; none while others are awaited.

        Raises:
            NoUsableNode, InvalidInput, DoesNotFit: no connected node can take part, and none still measures.
        """
        patience = self._nodes.patience
        is_late = now - self._first_ready > patience
        nodes = initial_nodes_of(present, self._run, now, patience, is_late=is_late)
        return nodes if (is_late and not self._needs_all) or len(nodes) >= self._expected else []

    def begins(self) -> None:
        """Note that the run begins."""
        self._number += 1

    def again(
        self, error: EvenerError, saved: int, now: float, *, may_have_trained: bool, before: int, able: int
    ) -> str:
        """Return a clause that says from where the run restarts after `error`; empty if it does not.

        Args:
            error: error that ended it.
            saved: step of the last checkpoint; 0 for none.
            now: time in seconds.
            may_have_trained: whether a step may have been made.
            before: number of ranks that it had.
            able: number of these ranks whose nodes can take part.
        """
        if not isinstance(error, NodeLost):
            return "" if may_have_trained else self._with_all(before)
        if may_have_trained and (reason := self.from_checkpoint(saved, before)):
            return reason
        if self._number < _MAX_STARTS:
            return self._from_the_same(now, able, may_have_trained=may_have_trained)
        return self.from_checkpoint(saved, before)

    def without(self, error: EvenerError, now: float, others: int) -> str:
        """Return from where the `others` restart without the nodes that `error` names; empty if there are no others.

        They restart from where the run began; it has used up its restarts with all nodes.
        """
        self._first_loss = self._first_loss or error
        return self._from_the_same(now, others, may_have_trained=False) if others else ""

    def explained(self, error: EvenerError) -> EvenerError:
        """Return `error`; or, where too few nodes remain for the options, the loss that made them too few."""
        is_of_few = isinstance(error, InvalidInput | DoesNotFit)
        return self._first_loss if self._first_loss is not None and is_of_few else error

    def _from_the_same(self, now: float, expected: int, *, may_have_trained: bool) -> str:
        self._first_ready, self._expected = now, expected
        if not may_have_trained:
            return "before the first step"
        return f"from the checkpoint of step {self.step}, as before:" if self.step else "from the first step:"

    def from_checkpoint(self, saved: int, expected: int) -> str:
        """Return a clause if the run restarts from the checkpoint of step `saved`; empty if it began from that.

        It waits up to the patience for `expected` nodes.
        """
        if saved <= self.step:
            return ""
        self.step, self._number, self._expected = saved, 0, expected
        self._first_ready, self._needs_all = inf, False
        return f"from the checkpoint of step {saved}, with the nodes that are available:"

    def _with_all(self, before: int) -> str:
        """Return a clause like `again`, for an error that is no loss, such as too few nodes for the plan."""
        if before >= self._expected:
            return ""
        self._needs_all, self._number = True, 0
        return f"when {self._expected} nodes are available, since {before} cannot continue:"


def initial_nodes_of(
    present: Sequence[NodeRecord], run: str, now: float, patience: float, *, is_late: bool
) -> list[NodeRecord]:
    """Return the nodes that a run begins on: all connected ones, once they are ready; none while some are awaited.

    Nodes that have joined and still measure their device are awaited, too, unless they are overdue: as if absent.

    Args:
        present: connected nodes.
        run: name of the run.
        now: time in seconds.
        patience: seconds of silence after which a node is excluded.
        is_late: whether the nodes that are ready have waited long enough for the others.

    Raises:
        NoUsableNode, InvalidInput, DoesNotFit: no connected node can take part, and none is still awaited.
    """
    awaited = [node for node in present if not node.is_overdue(now, patience)]
    able = [node for node in awaited if node.profile is not None and run not in node.left_out_of]
    ready = [node for node in able if node.ready_for == run]
    measures = any(node.profile is None for node in awaited)
    if awaited and not able and not measures:
        raise no_usable_node(present, run, now, patience)
    is_complete = len(ready) == len(able) and not measures
    return ready if is_late or is_complete else []


_GRACE_S = 1.0


class RunEnding:
    """The end of one run.

    Args:
        patience: seconds that the others have once a rank that worked when the run was stopped has ended.

    Attributes:
        reason: error because of which it stops; None while it does not.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._deadline = patience, inf
        self._working: list[RemoteRank] = []
        self.reason: EvenerError | None = None

    def stop(self, error: EvenerError, working: Sequence[RemoteRank], now: float, *, at_once: bool) -> bool:
        """Stop the run because of `error`; return whether it did not stop before. Repeating this has no effect.

        Args:
            error: why.
            working: ranks that may have something to finish.
            now: seconds.
            at_once: whether they get no time for it.
        """
        if at_once:
            self._deadline = min(self._deadline, now)
        if self.reason is not None:
            return False
        self.reason, self._working = error, list(working)
        return True

    def is_over(self, supervisor: RankSupervisor[RemoteRank], ranks: Sequence[RemoteRank], now: float) -> bool:
        """Return whether no rank is awaited any more."""
        needed = [rank for rank in ranks if supervisor.is_needed(rank)]
        if self._deadline == inf and any(rank.has_ended for rank in self._working if supervisor.is_needed(rank)):
            self._deadline = now + self._patience
        elif self._deadline == inf and self.reason is None and any(map(supervisor.ends_the_run, ranks)):
            self._deadline = now + _GRACE_S
        return now > self._deadline or all(rank.has_ended for rank in needed)

    def error(
        self, supervisor: RankSupervisor[RemoteRank], ranks: Sequence[RemoteRank], *, has_record: bool
    ) -> EvenerError | None:
        """Return the error that ended the run; None if it is complete."""
        error = why_ended([rank for rank in ranks if supervisor.ends_the_run(rank)], self.reason, len(ranks))
        return error or (None if has_record else TrainingFailed("the run ended without a record"))

    def begins_again(self) -> None:
        """Forget the ranks that failed: the run restarts."""
        self._deadline = inf
