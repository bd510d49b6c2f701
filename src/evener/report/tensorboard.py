"""A run's scalars for TensorBoard, while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from evener.errors import require
from evener.record import Step, Validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def open_scalars(folder: Path, node_names: Sequence[str]) -> ScalarWriter | None:
    """A writer of event files in `folder`; None if TensorBoard is not installed.

    Args:
        folder: made if it is not there.
        node_names: one a rank, for the names of the scalars.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return ScalarWriter(SummaryWriter(log_dir=str(folder)), node_names)


@final
class ScalarWriter:
    """Writes steps and validations as scalars, by the number of the step.

    loss/train, loss/validation, accuracy/validation, throughput/samples_per_second, and per node
    computing/<node> and waiting/<node>: fractions of the step's seconds.

    Args:
        writer: of TensorBoard; closed by `close`.
        node_names: one a rank; set the attribute anew when the ranks change.
    """

    def __init__(self, writer: SummaryWriter, node_names: Sequence[str]) -> None:
        self.node_names = tuple(node_names)
        self._writer = writer

    def step(self, step: Step) -> None:
        """Write one entry of a record's steps.

        Raises:
            InvalidValue: the step has another number of nodes than there are names.
        """
        require(len(step.nodes) == len(self.node_names), "step.nodes", len(step.nodes), f"{len(self.node_names)} nodes")
        if step.loss is not None:
            self._write("loss/train", step.loss, step.step)
        if step.seconds <= 0:
            return
        self._write("throughput/samples_per_second", step.samples / step.seconds, step.step)
        for name, node in zip(self.node_names, step.nodes, strict=True):
            computing = node.io_seconds + node.compute_seconds + node.update_seconds
            self._write(f"computing/{name}", computing / step.seconds, step.step)
            self._write(f"waiting/{name}", node.wait_seconds / step.seconds, step.step)

    def validation(self, validation: Validation) -> None:
        """Write one validation."""
        self._write("loss/validation", validation.loss, validation.step)
        if validation.accuracy is not None:
            self._write("accuracy/validation", validation.accuracy, validation.step)

    def close(self) -> None:
        """Write what is left and end the writer's thread."""
        self._writer.close()

    def _write(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, global_step=step)
