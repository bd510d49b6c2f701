"""Names and values of the scalars that a run logs, from its steps and validations.

loss/train, loss/validation, accuracy/validation, NAME/validation, throughput/samples_per_second, and per node
computing/<node> and waiting/<node>: fractions of the step's seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

from msgspec.structs import replace

from evener.records.errors import require
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import Step, TrainRecord, Validation


class ScalarLogger(Protocol):
    """A destination of scalars, such as `loggers.TensorBoard`."""

    def begin(self, plan: Plan) -> None:
        """Start a run, or continue it under another plan."""
        ...

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Store the scalars of one step; steps come in order."""
        ...

    def close(self) -> None:
        """End the run; do nothing if none was started."""
        ...


@final
class ScalarLog:
    """Writes the events of a run to a logger, from its plan on: the plan may be late if a connection broke.

    Args:
        logger: destination; closed when the record arrives, or by `close`.
    """

    def __init__(self, logger: ScalarLogger) -> None:
        self._logger = logger
        self._names: tuple[str, ...] = ()
        self._is_open = False

    def __call__(self, event: RunEvent) -> None:
        """Write the scalars of `event`, if it has any."""
        if isinstance(event, Plan):
            self._names = tuple(a.node for a in event.assignments)
            self._logger.begin(event)
            self._is_open = True
        elif isinstance(event, TrainRecord):
            self.close()
        elif self._is_open and isinstance(event, Step):
            names = self._names
            if len(names) != len(event.nodes):  # it is not known whose columns these are
                event, names = replace(event, nodes=()), ()
            self._logger.write(scalars_of_step(event, names), event.step)
        elif self._is_open and isinstance(event, Validation):
            self._logger.write(scalars_of_validation(event), event.step)

    def close(self) -> None:
        """Close the logger."""
        self._is_open = False
        self._logger.close()


def scalars_of_step(step: Step, node_names: Sequence[str]) -> dict[str, float]:
    """Return the scalars of one step of a record whose nodes have these names.

    Raises:
        InvalidValue: the number of nodes in the step differs from the number of names.
    """
    require(len(step.nodes) == len(node_names), "step.nodes", len(step.nodes), f"{len(node_names)} nodes")
    scalars = {} if step.loss is None else {"loss/train": step.loss}
    if step.seconds <= 0:
        return scalars
    scalars["throughput/samples_per_second"] = step.samples / step.seconds
    for node_name, node in zip(node_names, step.nodes, strict=True):
        computing = node.io_seconds + node.compute_seconds + node.update_seconds
        scalars[f"computing/{node_name}"] = computing / step.seconds
        scalars[f"waiting/{node_name}"] = node.wait_seconds / step.seconds
    return scalars


def scalars_of_validation(validation: Validation) -> dict[str, float]:
    """Return the loss, the accuracy and the task's own metrics."""
    scalars = {"loss/validation": validation.loss}
    if validation.accuracy is not None:
        scalars["accuracy/validation"] = validation.accuracy
    return {**scalars, **{f"{name}/validation": value for name, value in validation.metrics.items()}}
