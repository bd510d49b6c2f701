"""Restarts of a local run without a lost node, where its ranks cannot continue.

no step was made, replicas           the other nodes begin again without the lost node
the plan uses one node of several    the others are spare: one goes on from the last checkpoint, or begins again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from evener.config.run_config import RunConfig
from evener.launch.nodes import shares_of
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import Event, Step, TrainRecord
from evener.training.checkpoint import Checkpoints


class SpareNodes:
    """The nodes of one local run, for restarts.

    Args:
        show: shows what happens.
    """

    def __init__(self, show: Callable[[RunEvent], object]) -> None:
        self._show = show
        self._plan: Plan | None = None
        self._lost: tuple[Event, ...] = ()
        self._has_trained = False

    def show(self, event: RunEvent) -> object:
        """Show `event`; add the nodes that were lost before the last restart to the record."""
        if isinstance(event, Plan):
            self._plan = event
        elif isinstance(event, Step):
            self._has_trained = True
        elif isinstance(event, TrainRecord):
            event = replace(event, events=(*self._lost, *event.events))
        return self._show(event)

    def take(self, config: RunConfig, positions: Sequence[int], lost: Event) -> RunConfig | None:
        """Return the config for the nodes at `positions`, without the lost ones; None if the run ends.

        The result is the same as that of all nodes.
        """
        if not self._has_trained and config.strategy in ("auto", "data") and config.plan is None:
            instead = _among(config, positions)
        elif self._plan is None or len(self._plan.assignments) > 1 or config.shares not in ("measured", "equal"):
            instead = None
        else:
            instead = replace(config, resume=not Checkpoints(config.checkpoint_folder).is_empty)
        if instead is not None:
            self._lost = (*self._lost, lost)
        return instead


def _among(config: RunConfig, positions: Sequence[int]) -> RunConfig | None:
    """Return `config` for the nodes at `positions`; None if the user gave them no samples."""
    shares = shares_of(config.shares, positions)
    if shares is None:
        return None
    if shares == config.shares or config.local_nodes is None:
        return replace(config, shares=shares)
    speeds, memory = config.local_nodes.split(","), config.memory
    if memory is not None and len(sizes := memory.split(",")) > 1:
        memory = ",".join(sizes[position] for position in positions)
    local_nodes = ",".join(speeds[position] for position in positions)
    return replace(config, shares=shares, local_nodes=local_nodes, memory=memory)
