"""Finds how fast a device does some kinds of work: climbs to problems that fill it, then repeats them.

    rung 0, 1, 2 ...         ever larger problems of one kind, each timed on the way up
    climb on while           a call is short (below 2 ms), or is longer but its rate well above that of the rung below
    the top                  the lowest rung from which it is not worth while to climb on, as far as is known
    until the time is over   on one ladder after the other, time the top and the two rungs below it again, find the top
                             anew, and climb on if that is worth while now
    the answer               the highest rate among these three and what is above

The seconds of a rung are the lower quartile of its calls. A busy machine makes many a call slower, so the mean would
not repeat; a few are faster than they can be for long, while a neighbour that shares the core happens to pause, so the
least would not either. Where to stop is decided anew by the quartile, not by one unlucky call.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import cycle

_GAIN_WORTH_A_CALL_OF = ((0.002, 0.0), (0.030, 1.1))
"""(seconds, gain): a call shorter than so many seconds is followed by a larger one if it gained so much in rate."""
_LONG_CALL = 0.005
_RUNGS_REPEATED = 3
_LEAST_ROUNDS = 4


class Autorange:
    """Ever larger problems of one kind.

    Args:
        flops: of one call at every rung, increasing.
        seconds_of: runs the problem of a rung once and returns its seconds. If it raises RuntimeError or TypeError, the
            ladder ends below that rung (out of memory); at rung 0 the device refuses this kind of work.
    """

    def __init__(self, flops: Sequence[float], seconds_of: Callable[[int], float]) -> None:
        self.refusal = ""
        self._flops, self._seconds_of = flops, seconds_of
        self._height = len(flops)
        self._times: list[list[float]] = []

    @property
    def rate(self) -> float | None:
        """FLOP/s, as known by now; None where the device refuses the work, as `refusal` says."""
        return max(self._rates()[self._lowest() :], default=None)

    def climb(self) -> None:
        """Time the next rungs, as far as worth while."""
        while len(self._times) < self._height and self._top() == len(self._times):
            try:
                self._times.append(self._first_times(len(self._times)))
            except (RuntimeError, TypeError) as error:
                self._height = len(self._times)
                self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__

    def repeat(self) -> None:
        """Time the top rungs again, and climb on if that made them look better."""
        for rung in range(len(self._times))[self._lowest() : self._top() + 1]:
            insort(self._times[rung], self._seconds_of(rung))
        self.climb()

    def _first_times(self, rung: int) -> list[float]:
        """Of the first call, or of the second where the first was long: it may have had to compile."""
        seconds = self._seconds_of(rung)
        return [seconds if seconds < _LONG_CALL else min(seconds, self._seconds_of(rung))]

    def _quartiles(self) -> list[float]:
        return [times[len(times) // 4] for times in self._times]

    def _rates(self) -> list[float]:
        return [flops / seconds for flops, seconds in zip(self._flops, self._quartiles(), strict=False)]

    def _lowest(self) -> int:
        """The lowest rung that is repeated."""
        return max(0, min(self._top(), len(self._times) - 1) - _RUNGS_REPEATED + 1)

    def _top(self) -> int:
        """The lowest rung from which it is not worth while to climb on, or else the first that was not timed."""
        below = 0.0
        for rung, (seconds, rate) in enumerate(zip(self._quartiles(), self._rates(), strict=True)):
            if not any(seconds < limit and rate > enough * below for limit, enough in _GAIN_WORTH_A_CALL_OF):
                return rung
            below = rate
        return len(self._times)


def autorange(
    ladders: Sequence[Autorange], budget_seconds: float, now: Callable[[], float] = time.perf_counter
) -> None:
    """Climb every ladder, then repeat them in turn until the time is over.

    Args:
        ladders: whose `rate` says the result.
        budget_seconds: after which nothing is repeated any more. The climb and four rounds are always made.
        now: the clock that the budget is read from.
    """
    start = now()
    for ladder in ladders:
        ladder.climb()
    for count, ladder in enumerate(cycle(ladders)):
        if count >= _LEAST_ROUNDS * len(ladders) and now() - start >= budget_seconds:
            return
        ladder.repeat()
