"""How often a rank copies its part of the model to another rank: the cost of copies against the cost of a loss."""

from __future__ import annotations

from math import sqrt

MEAN_TIME_BETWEEN_LOSSES_S = 3600.0
"""Default mean time between two losses of a node: pessimistic for servers, optimistic for borrowed computers."""


def replication_interval(
    copy_seconds: float, step_seconds: float, mean_time_between_losses: float = MEAN_TIME_BETWEEN_LOSSES_S
) -> int:
    """Return the steps between two copies, at least 1, that minimise the time lost to copies and repeated steps.

    The optimal interval is sqrt(2 C M) seconds (Young, 1974, A first order approximation to the optimum checkpoint
    interval).

    Args:
        copy_seconds: C, by which a copy delays the run.
        step_seconds: seconds of a step.
        mean_time_between_losses: M, seconds between two losses of a node.
    """
    return max(1, round(sqrt(2 * copy_seconds * mean_time_between_losses) / max(step_seconds, 1e-9)))
