"""Who works against everybody else: whoever is far longer than is usual, or long and away from all others.

    of every contribution its length is kept, and a sample: 1024 numbers at most, at places that the server alone knows
    its length is an outlier       if it, and its worker's last 8 in the (logarithmic) mean, are more than 5 times the
                                   median of the last 64, and that mean by 5 of its (robust) standard errors; whether
                                   lengths grow with the samples, shrink with their root (noise), or do neither: in
                                   each of these views
    it is opposed                  if, besides, it is more than 100 times that median, wherever it points, unless half
                                   of all workers are (10,000 times where less than 8 of its worker are known); or if
                                   its sample points away from the mean direction of the others' last ones
    a worker works against all     after 3 opposed ones of its last 10, while none of the others' was

What is opposed is left out. Nobody is judged before three workers are known. Nobody is judged by its direction before
four contributions are known, nor while others are opposed as well: then the data or the training changed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from math import ceil, isfinite, log, sqrt
from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

from evener.sync.layout import Flat

MOST_TIMES = 5.0
"""The median of lengths, that a contribution may be long without a second look."""
FAR_TIMES, FIRST_FAR_TIMES = 100.0, 1e4
"""That median, beyond which an outlier is left out, wherever it points; the second while less than 8 of a worker's last
contributions are known, as a single batch may be as long."""
STRIKES = 3
"""Opposed contributions, of the last `_OF`, after which a worker is taken to work against all."""
_OF = 10
_MOST_DEVIATIONS = 5.0
_LEAST_DEVIATION = 0.1
"""Of the logarithm of lengths: less is taken for this, or some equal lengths would make outliers of all others."""
_SAMPLE = 1024
"""Numbers of a contribution that are looked at."""
_LENGTHS, _OWN, _DIRECTIONS = 64, 8, 16
"""How many of the last contributions are remembered: of all, by length; of one worker; of all, by direction."""
_LEAST_KNOWN, _LEAST_WORKERS = 4, 3
"""Contributions, and workers, without which nobody can say who is in the wrong."""
_OFTEN = 8
"""Contributions after which it is looked anew what length is usual."""
_VIEWS = (0.0, 0.5, -1.0)
"""Powers of the samples that make lengths comparable: nothing to be done, gradients that are noise, local steps."""


class Opposition:
    """Looks at every contribution before it is merged."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[str, float, int]] = deque(maxlen=_LENGTHS)
        self._samples: deque[tuple[str, NDArray[np.float64], float]] = deque(maxlen=_DIRECTIONS)
        self._verdicts: defaultdict[str, deque[bool]] = defaultdict(partial(deque, maxlen=_OF))
        self._place: tuple[int, slice] | None = None
        self._usual, self._until = 0.0, 0

    def examine(self, contributions: Sequence[tuple[str, Flat, int]]) -> list[int]:
        """Which of a round's contributions, or of one alone, are opposed.

        Args:
            contributions: worker, contribution and number of samples of each.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = [self._observe(*one) for one in contributions]
        if len(self._lengths) < _LEAST_WORKERS:
            return []
        self._refresh(len(contributions))
        far_workers = self._far_workers(max(lengths, default=0.0))
        found = []
        for i, (worker, _, _) in enumerate(contributions):
            is_far = worker in far_workers and self._is_far(worker, lengths[i])
            is_opposed = is_far or (lengths[i] > MOST_TIMES * self._usual and self._is_opposed(worker))
            self._verdicts[worker].append(is_opposed)
            if is_opposed:
                found.append(i)
        return found

    def is_against_all(self, worker: str) -> bool:
        """Whether a worker's last contributions show that it works against all others."""
        return sum(self._verdicts[worker]) >= STRIKES

    def _observe(self, worker: str, flat: Flat, num_samples: int) -> float:
        """Remember a contribution; its length, 0 if it is not finite."""
        sample, length = self._sample(flat), _length_of(flat)
        own = sqrt(np.dot(sample, sample))
        if not isfinite(length) or length == 0.0 or num_samples <= 0:
            return 0.0
        self._lengths.append((worker, length, num_samples))
        if isfinite(own) and own > 0:
            self._samples.append((worker, sample, own))
        return length

    def _sample(self, flat: Flat) -> NDArray[np.float64]:
        if self._place is None:
            sizes = [len(array) for array in flat.parameters]
            stride = ceil(max(sizes) / _SAMPLE)
            self._place = sizes.index(max(sizes)), slice(SystemRandom().randrange(stride), None, stride)
        which, places = self._place
        return flat.parameters[which][places].astype(np.float64)

    def _refresh(self, count: int) -> None:
        """Now and then, find what lengths are usual."""
        self._until -= count
        if self._until <= 0:
            self._usual = sorted(length for _, length, _ in self._lengths)[len(self._lengths) // 2]
            self._until = min(_OFTEN, len(self._lengths))

    def _far_workers(self, longest: float) -> set[str]:
        """Workers that are far longer than is usual, last and often; nobody if half of all are."""
        last = {name: length for name, length, _ in self._lengths}
        if longest <= FAR_TIMES * self._usual or len(last) < _LEAST_WORKERS:
            return set()
        far = {name for name, length in last.items() if self._is_far(name, length) and self._is_outlier(name)}
        return far if 2 * len(far) < len(last) else set()

    def _is_far(self, worker: str, length: float) -> bool:
        is_known = sum(name == worker for name, _, _ in self._lengths) >= _OWN
        return length > (FAR_TIMES if is_known else FIRST_FAR_TIMES) * self._usual

    def _is_opposed(self, worker: str) -> bool:
        if len(self._lengths) < _LEAST_KNOWN:
            return False
        others = {name for name, _, _ in self._samples if name != worker}
        if len(others) < _LEAST_WORKERS - 1 or self._are_others_opposed(worker):
            return False
        return self._is_outlier(worker) and self._points_away(worker)

    def _are_others_opposed(self, worker: str) -> bool:
        others = [own for name, own in self._verdicts.items() if name != worker and not self.is_against_all(name)]
        return any(map(any, others))

    def _is_outlier(self, worker: str) -> bool:
        lengths = np.log([length for _, length, _ in self._lengths])
        samples = np.log([float(n) for _, _, n in self._lengths])
        own = [i for i, (name, _, _) in enumerate(self._lengths) if name == worker][-_OWN:]
        for power in _VIEWS:
            seen = lengths + power * samples
            middle = float(np.median(seen))
            deviation = max(1.4826 * float(np.median(np.abs(seen - middle))), _LEAST_DEVIATION)
            excess = float(seen[own].mean()) - middle
            if excess <= max(log(MOST_TIMES), _MOST_DEVIATIONS * deviation / sqrt(len(own))):
                return False
        return True

    def _points_away(self, worker: str) -> bool:
        own = next((sample for name, sample, _ in reversed(self._samples) if name == worker), None)
        if own is None:
            return False
        others = np.sum([sample / length for name, sample, length in self._samples if name != worker], axis=0)
        return float(np.dot(own, others)) < 0.0


def _length_of(flat: Flat) -> float:
    """The Euclidean norm; of numbers whose squares overflow, the largest of them. Not finite if one of them is not."""
    length = sqrt(sum(float(np.dot(array, array)) for array in flat.floats))
    return length if isfinite(length) else max(float(np.abs(array).max()) for array in flat.floats if array.size)
