"""What a node needs of whatever computes, besides what agreeing needs: making ready, validating, going away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from evener.ps.job import Job
from evener.sync.flat import Flat
from evener.sync.worker import Engine


class NodeEngine(Engine, Protocol):
    """A model with its data on a node, ready for one job."""

    def unit_seconds(self) -> float:
        """Seconds that one sample takes in a batch of the size that is to be expected, measured now."""
        ...

    def assess(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """Sum of the losses, and number of right answers, of samples [first, first + size) for validation.

        The model is afterwards what it was before.
        """
        ...

    def close(self) -> None:
        """Let go of memory and files."""
        ...


class Workshop(NamedTuple):
    """What an engine is made from.

    Attributes:
        job: to be done.
        code: folder of the task's files; None for a built-in task.
        data: folder of the data; None if the task knows.
        device: that computes.
        speed: 1, or the fraction to which the node is slowed down.
        between_steps: to be called between local steps: raises if the run is over.
    """

    job: Job
    code: Path | None
    data: Path | None
    device: str
    speed: float
    between_steps: Callable[[], None]


def enough(indices: NDArray[np.int64], *, normalises: bool) -> NDArray[np.int64]:
    """Samples [N] to learn from; one alone is taken twice if a layer normalises over the batch, which refuses one.

    The mean loss, its gradient and the mean of the statistics are those of the sample; shares are uneven, and nobody
    chose to have one sample only.
    """
    return indices.repeat(2) if normalises and len(indices) == 1 else indices


Build = Callable[[Workshop], NodeEngine]
"""Makes the engine of a job. Raises EvenerError, or whatever the task's own code raises."""
