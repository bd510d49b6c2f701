"""How a run whose ranks work together comes to its end.

every rank that is needed has ended    -> it is over
one of them failed by itself           -> the others have a second to end, too, and say what they know
it was to stop                         -> they have the patience to end after their step
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from evener.elastic.elastic_ranks import ElasticRanks
from evener.errors import EvenerError, TrainingFailed
from evener.ps.remote_rank import RemoteRank, why_ended

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
        error = why_ended([rank for rank in ranks if elastic.ends_the_run(rank)], self.reason)
        return error or (None if has_record else TrainingFailed("the run ended without a record"))

    def begins_again(self) -> None:
        """The ranks that failed are gone."""
        self._deadline = inf
