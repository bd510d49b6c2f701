"""How often a part of a model is copied elsewhere: what copies cost against what a loss costs without them."""

from __future__ import annotations

from math import sqrt

FAULT_SECONDS = 3600.0
"""Between two losses of a node, as nobody knows better: often for machines, rarely for a room of borrowed ones."""


def steps_between_copies(copy_seconds: float, step_seconds: float, fault_seconds: float = FAULT_SECONDS) -> int:
    """The steps between two copies that cost the least time, copies and repeated steps together: at least 1.

    sqrt(2 C M) seconds (Young, 1974, A first order approximation to the optimum checkpoint interval).

    Args:
        copy_seconds: C, that a copy delays the run.
        step_seconds: of a step.
        fault_seconds: M, mean time between two losses.
    """
    return max(1, round(sqrt(2 * copy_seconds * fault_seconds) / max(step_seconds, 1e-9)))
