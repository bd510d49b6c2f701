"""Detects outliers among contributions: far longer than usual, or long and pointing away from all others.

    of each contribution the server keeps its length and a sample: at most 1024 numbers at secret positions
    its length is an outlier       if it, and its worker's last 8 in the (logarithmic) mean, are more than 5 times the
                                   median of the last 64, and that mean by 5 of its (robust) standard errors; in each
                                   of 3 views: lengths grow with the samples, shrink with their root (noise), or neither
    the contribution is an outlier if its length is also more than 100 times that median, unless half of all workers
                                   are (10,000 times while less than 8 of its worker are known); or if its sample points
                                   away from the mean direction of the others' last ones
    a worker is faulty             after 3 outliers of its last 10, while none of the others had any

Outliers are left out. No worker is judged before three workers are known. None is judged by its direction before four
contributions are known, nor while others have outliers: then the data or the training changed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from math import ceil, isfinite, log, sqrt
from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

from evener.agreements.layout import Flat

MAX_FACTOR = 5.0
"""Factor of the median length up to which a contribution is not examined further."""
FAR_FACTOR, FIRST_FAR_FACTOR = 100.0, 1e4
"""Factor of the median length above which an outlier is left out in any direction; the second applies while less than 8
of a worker's last contributions are known, since a single batch may be as long.
"""
STRIKES = 3
"""Outliers among the last `_NUM_VERDICTS` contributions after which a worker is faulty."""
_NUM_VERDICTS = 10
_MAX_DEVIATIONS = 5.0
_MIN_DEVIATION = 0.1
"""Minimum deviation of logarithmic lengths: otherwise some equal lengths would make all others outliers."""
_SAMPLE_SIZE = 1024
"""Numbers of a contribution that are examined."""
_NUM_LENGTHS, _NUM_WORKER_LENGTHS, _NUM_DIRECTIONS = 64, 8, 16
"""Numbers of remembered contributions: of all, by length; of one worker; of all, by direction."""
_MIN_CONTRIBUTIONS, _MIN_WORKERS = 4, 3
"""Contributions and workers that are needed to judge."""
_REFRESH_INTERVAL = 8
"""Contributions after which the median length is computed again."""
_VIEWS = (0.0, 0.5, -1.0)
"""Powers of the samples that make lengths comparable: no change, gradients that are noise, local steps."""


class OutlierDetector:
    """Examines every contribution before it is merged."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[str, float, int]] = deque(maxlen=_NUM_LENGTHS)
        self._samples: deque[tuple[str, NDArray[np.float64], float]] = deque(maxlen=_NUM_DIRECTIONS)
        self._verdicts: defaultdict[str, deque[bool]] = defaultdict(partial(deque, maxlen=_NUM_VERDICTS))
        self._place: tuple[int, slice] | None = None
        self._usual, self._until = 0.0, 0

    def examine(self, contributions: Sequence[tuple[str, Flat, int]]) -> list[int]:
        """Return the indices of outliers in a round, or of a single contribution.

        Args:
            contributions: worker, contribution and number of samples of each.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = [self._observe(*one) for one in contributions]
        if len(self._lengths) < _MIN_WORKERS:
            return []
        self._refresh(len(contributions))
        far_workers = self._far_workers(max(lengths, default=0.0))
        outliers = []
        for i, (worker, _, _) in enumerate(contributions):
            is_far = worker in far_workers and self._is_far(worker, lengths[i])
            is_outlier = is_far or (lengths[i] > MAX_FACTOR * self._usual and self._is_outlier(worker))
            self._verdicts[worker].append(is_outlier)
            if is_outlier:
                outliers.append(i)
        return outliers

    def is_faulty(self, worker: str) -> bool:
        """Return whether a worker's last contributions show that it is faulty."""
        return sum(self._verdicts[worker]) >= STRIKES

    def _observe(self, worker: str, flat: Flat, num_samples: int) -> float:
        """Remember a contribution; return its length, 0 if it is not finite."""
        sample, length = self._sample(flat), _length_of(flat)
        sample_length = sqrt(np.dot(sample, sample))
        if not isfinite(length) or length == 0.0 or num_samples <= 0:
            return 0.0
        self._lengths.append((worker, length, num_samples))
        if isfinite(sample_length) and sample_length > 0:
            self._samples.append((worker, sample, sample_length))
        return length

    def _sample(self, flat: Flat) -> NDArray[np.float64]:
        if self._place is None:
            sizes = [len(array) for array in flat.parameters]
            stride = ceil(max(sizes) / _SAMPLE_SIZE)
            self._place = sizes.index(max(sizes)), slice(SystemRandom().randrange(stride), None, stride)
        which, places = self._place
        return flat.parameters[which][places].astype(np.float64)

    def _refresh(self, count: int) -> None:
        """Compute the median length at intervals."""
        self._until -= count
        if self._until <= 0:
            self._usual = sorted(length for _, length, _ in self._lengths)[len(self._lengths) // 2]
            self._until = min(_REFRESH_INTERVAL, len(self._lengths))

    def _far_workers(self, longest: float) -> set[str]:
        """Return the workers whose last and usual lengths are far too long; none if half of all are."""
        if longest <= FAR_FACTOR * self._usual:
            return set()
        last = {name: length for name, length, _ in self._lengths}
        if len(last) < _MIN_WORKERS:
            return set()
        far = {name for name, length in last.items() if self._is_far(name, length) and self._is_too_long(name)}
        return far if 2 * len(far) < len(last) else set()

    def _is_far(self, worker: str, length: float) -> bool:
        is_known = sum(name == worker for name, _, _ in self._lengths) >= _NUM_WORKER_LENGTHS
        return length > (FAR_FACTOR if is_known else FIRST_FAR_FACTOR) * self._usual

    def _is_outlier(self, worker: str) -> bool:
        if len(self._lengths) < _MIN_CONTRIBUTIONS:
            return False
        others = {name for name, _, _ in self._samples if name != worker}
        if len(others) < _MIN_WORKERS - 1 or self._have_others_outliers(worker):
            return False
        return self._is_too_long(worker) and self._points_away(worker)

    def _have_others_outliers(self, worker: str) -> bool:
        others = [verdicts for name, verdicts in self._verdicts.items() if name != worker and not self.is_faulty(name)]
        return any(map(any, others))

    def _is_too_long(self, worker: str) -> bool:
        lengths = np.log([length for _, length, _ in self._lengths])
        samples = np.log([float(n) for _, _, n in self._lengths])
        indices = [i for i, (name, _, _) in enumerate(self._lengths) if name == worker][-_NUM_WORKER_LENGTHS:]
        for power in _VIEWS:
            seen = lengths + power * samples
            middle = float(np.median(seen))
            deviation = max(1.4826 * float(np.median(np.abs(seen - middle))), _MIN_DEVIATION)
            excess = float(seen[indices].mean()) - middle
            if excess <= max(log(MAX_FACTOR), _MAX_DEVIATIONS * deviation / sqrt(len(indices))):
                return False
        return True

    def _points_away(self, worker: str) -> bool:
        own_sample = next((sample for name, sample, _ in reversed(self._samples) if name == worker), None)
        if own_sample is None:
            return False
        others = np.sum([sample / length for name, sample, length in self._samples if name != worker], axis=0)
        return float(np.dot(own_sample, others)) < 0.0


def _length_of(flat: Flat) -> float:
    """Return the Euclidean norm, or the largest absolute value if squares overflow; not finite if a number is not."""
    length = sqrt(sum(float(np.dot(array, array)) for array in flat.floats))
    return length if isfinite(length) else max(float(np.abs(array).max()) for array in flat.floats if array.size)
