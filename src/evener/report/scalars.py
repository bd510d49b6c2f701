"""What a run is told by in curves: names and numbers of its steps and validations, and the loggers that they go to.

loss/train, loss/validation, accuracy/validation, NAME/validation, throughput/samples_per_second, and per node
computing/<node> and waiting/<node>: fractions of the step's seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

from evener.records.errors import require
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import Step, TrainRecord, Validation


class ScalarLogger(Protocol):
    """Where scalars go: whatever has these three methods."""

    def begin(self, plan: Plan) -> None:
        """A run begins, or goes on by another plan."""
        ...

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Keep some scalars of a step, which come in order."""
        ...

    def close(self) -> None:
        """The run is over; nothing if none began."""
        ...


@final
class ScalarLog:
    """Writes a run's events to a logger, in whose place it can be called.

    Args:
        logger: closed with the record, or by `close`.
    """

    def __init__(self, logger: ScalarLogger) -> None:
        self._logger = logger
        self._names: tuple[str, ...] = ()

    def __call__(self, event: RunEvent) -> None:
        """Keep what can be drawn of `event`."""
        if isinstance(event, Plan):
            self._names = tuple(a.node for a in event.assignments)
            self._logger.begin(event)
        elif isinstance(event, Step):
            self._logger.write(scalars_of_step(event, self._names), event.step)
        elif isinstance(event, Validation):
            self._logger.write(scalars_of_validation(event), event.step)
        elif isinstance(event, TrainRecord):
            self.close()

    def close(self) -> None:
        """Have everything written."""
        self._logger.close()


def scalars_of_step(step: Step, node_names: Sequence[str]) -> dict[str, float]:
    """Of one entry of a record's steps, on nodes of these names.

    Raises:
        InvalidValue: the step has another number of nodes than there are names.
    """
    require(len(step.nodes) == len(node_names), "step.nodes", len(step.nodes), f"{len(node_names)} nodes")
    found = {} if step.loss is None else {"loss/train": step.loss}
    if step.seconds <= 0:
        return found
    found["throughput/samples_per_second"] = step.samples / step.seconds
    for name, node in zip(node_names, step.nodes, strict=True):
        computing = node.io_seconds + node.compute_seconds + node.update_seconds
        found[f"computing/{name}"] = computing / step.seconds
        found[f"waiting/{name}"] = node.wait_seconds / step.seconds
    return found


def scalars_of_validation(validation: Validation) -> dict[str, float]:
    """Loss, accuracy and the task's own metrics."""
    found = {"loss/validation": validation.loss}
    if validation.accuracy is not None:
        found["accuracy/validation"] = validation.accuracy
    return {**found, **{f"{name}/validation": value for name, value in validation.metrics.items()}}
