"""Where a plan uses one node of several, the others are spare: they go on from its checkpoint when it is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from evener.config.run_config import RunConfig
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import Event, TrainRecord
from evener.training.checkpoint import Checkpoints


class SpareNodes:
    """Those of one run.

    Args:
        show: shows what happens.
    """

    def __init__(self, show: Callable[[RunEvent], object]) -> None:
        self._show = show
        self._plan: Plan | None = None
        self._lost: tuple[Event, ...] = ()

    def show(self, event: RunEvent) -> object:
        """Show `event`; the record tells of the nodes that were lost before the last beginning, too."""
        if isinstance(event, Plan):
            self._plan = event
        elif isinstance(event, TrainRecord):
            event = replace(event, events=(*self._lost, *event.events))
        return self._show(event)

    def take(self, config: RunConfig, _kept: Sequence[int], lost: Event) -> RunConfig | None:
        """What the nodes that are left have to do without the lost one; None: the run ends.

        They begin again from the last checkpoint, or from the first step if there is none. The result is the same.
        """
        if self._plan is None or len(self._plan.assignments) > 1 or config.shares not in ("measured", "equal"):
            return None
        self._lost = (*self._lost, lost)
        return replace(config, resume=not Checkpoints(config.checkpoint_folder).is_empty)
