"""The straight line through a task's measured batches; pure."""

from __future__ import annotations

from evener.profile import TaskTiming

_CLOCK_RESOLUTION = 1e-9


def affine(timing: TaskTiming) -> tuple[float, float]:
    """The (fixed_seconds, sample_seconds) of a step of n samples: fixed + sample * n, neither negative.

    Least squares of the relative error, (predicted / measured - 1)^2, so that small batches count like large ones; the
    seconds of the optimiser's update are then added to the fixed part. One batch alone gives a line through zero.
    """
    points = [(float(b.samples), max(b.seconds, _CLOCK_RESOLUTION)) for b in timing.batches]
    fixed, per_sample = _nonnegative_line(points)
    return fixed + timing.update_seconds, per_sample


def _nonnegative_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(start, slope) of the best line through (n, t).

    If the free line has a negative number, the best allowed one has a zero there.
    """
    weights = [1 / t**2 for _, t in points]
    total = sum(weights)
    n_mean = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - n_mean) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    if spread == 0:
        return 0.0, t_mean / n_mean
    slope = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t) in zip(weights, points, strict=True)) / spread
    if slope < 0:
        return t_mean, 0.0
    start = t_mean - slope * n_mean
    if start < 0:
        return 0.0, sum(n / t for n, t in points) / sum((n / t) ** 2 for n, t in points)
    return start, slope
