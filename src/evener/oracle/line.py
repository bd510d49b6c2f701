"""The straight line through measured seconds: what turns a few timings into seconds of any number of samples."""

from __future__ import annotations

from collections.abc import Iterable

_CLOCK_RESOLUTION = 1e-9


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (fixed, each) of seconds = fixed + n * each through (n, seconds), neither negative.

    Least squares of the relative error, (predicted / measured - 1)^2, so that small n count like large ones. One point
    alone gives a line through zero. If the free line has a negative number, the best allowed one has a zero there.
    """
    known = [(float(n), max(t, _CLOCK_RESOLUTION)) for n, t in points]
    weights = [1 / t**2 for _, t in known]
    total = sum(weights)
    n_mean = sum(w * n for w, (n, _) in zip(weights, known, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, known, strict=True)) / total
    spread = sum(w * (n - n_mean) ** 2 for w, (n, _) in zip(weights, known, strict=True))
    if spread == 0:
        return 0.0, t_mean / n_mean
    slope = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t) in zip(weights, known, strict=True)) / spread
    if slope < 0:
        return t_mean, 0.0
    start = t_mean - slope * n_mean
    if start < 0:
        return 0.0, sum(n / t for n, t in known) / sum((n / t) ** 2 for n, t in known)
    return start, slope
