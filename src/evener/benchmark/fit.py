"""The straight line through a task's measured batches; pure."""

from __future__ import annotations

from evener.oracle.cost.roofline import fit_line
from evener.profile import TaskTiming


def affine(timing: TaskTiming) -> tuple[float, float]:
    """The (fixed_seconds, sample_seconds) of a step of n samples: fixed + sample * n, neither negative.

    The seconds of the optimiser's update are added to the fixed part.
    """
    fixed, each = fit_line((batch.samples, batch.seconds) for batch in timing.batches)
    return fixed + timing.update_seconds, each
