"""When the run in progress is written down: often enough to lose little, seldom enough to cost little."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from evener.ps.memory import Keeper, Memory
from evener.ps.roster import Roster
from evener.ps.run import Run
from evener.sync.snapshot import Snapshot

_KEEP_SECONDS = 2.0
"""Between two snapshots, at least."""
_MOST_KEEPING = 0.05
"""Of the master's time, that taking snapshots may cost."""


class Keeping:
    """Writes down one run at a time; close it.

    Args:
        keeper: that writes.
        clock: seconds.
        say: tells the master's user.
    """

    def __init__(self, keeper: Keeper, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._keeper, self._clock, self._say = keeper, clock, say
        self._after = 0.0
        self._version = -1

    def recall(self) -> tuple[Memory, Snapshot] | None:
        """The run that was in progress, if there was one. Raises InvalidFile."""
        return self._keeper.recall()

    def keep_if_due(self, run: Run, roster: Roster, *, begun: float, submitted: float) -> None:
        """Begin to write down the run, if it has gone on and the time has come."""
        is_news = run.server.version != self._version
        if is_news and self._clock() >= self._after and not self._keeper.is_busy:
            self.keep(run, roster, begun=begun, submitted=submitted)

    def keep(self, run: Run, roster: Roster, *, begun: float, submitted: float) -> None:
        """Begin to write down the run; see `Memory`."""
        now = self._clock()
        snapshot = run.server.snapshot()
        state = replace(snapshot.state, unit_seconds=dict(snapshot.state.unit_seconds))
        memory = Memory(
            server=f"server-{run.server.version}.safetensors",
            job=run.job,
            ledger=run.ledger.state(),
            used=run.used,
            due=run.due,
            begun=begun,
            submitted=submitted,
            roster=roster.snapshot(now),
        )
        try:
            self._keeper.keep(memory, Snapshot(state, snapshot.weights, snapshot.optimiser))
        except OSError as error:
            self._say(f"warning: the run cannot be written down, a killed master would lose it: {error}")
        self._version = run.server.version
        self._after = now + max(_KEEP_SECONDS, (self._clock() - now) / _MOST_KEEPING)

    def forget(self) -> None:
        """The run is over."""
        self._keeper.forget()
        self._version, self._after = -1, 0.0

    def close(self) -> None:
        """Wait until everything is written."""
        self._keeper.close()
