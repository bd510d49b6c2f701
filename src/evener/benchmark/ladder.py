"""Finds how fast a device does some kinds of work: climbs to problems that fill it, then repeats and keeps the best.

    rung 0, 1, 2 ...         ever larger problems of one kind, each timed on the way up
    climb on while           a call is short (below 2 ms), or is longer but its rate well above that of the rung below
    until the time is over   on one ladder after the other, time the three highest rungs again, keep each one's least
                             seconds, and climb on where these allow it
    the answer               the highest rate among those three

A busy machine only ever makes a call slower, so the least seconds of many short calls, spread over time, repeat
where means do not; and where to stop is decided anew by these, not by one unlucky call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import cycle

_GAIN_WORTH_A_CALL_OF = ((0.002, 0.0), (0.030, 1.1))
"""(seconds, gain): a call shorter than so many seconds is followed by a larger one if it gained so much in rate."""
_LONG_CALL = 0.005
RUNGS_REPEATED = 3
_LEAST_ROUNDS = 2


class Ladder:
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
        self._least: list[float] = []

    @property
    def rate(self) -> float | None:
        """The best FLOP/s so far; None where the device refuses the work, as `refusal` says."""
        return max((self._flops[rung] / self._least[rung] for rung in self._highest()), default=None)

    def climb(self) -> None:
        """Time the next rungs, as far as worth while."""
        while len(self._least) < self._height and self._is_worth_climbing():
            try:
                self._least.append(self._first_seconds(len(self._least)))
            except (RuntimeError, TypeError) as error:
                self._height = len(self._least)
                self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__

    def repeat(self) -> None:
        """Time the highest rungs again, and climb on if that made them look better."""
        for rung in self._highest():
            self._least[rung] = min(self._least[rung], self._seconds_of(rung))
        self.climb()

    def _first_seconds(self, rung: int) -> float:
        """Of the first call, or of the second where the first was long: it may have had to compile."""
        seconds = self._seconds_of(rung)
        return seconds if seconds < _LONG_CALL else min(seconds, self._seconds_of(rung))

    def _highest(self) -> range:
        return range(max(0, len(self._least) - RUNGS_REPEATED), len(self._least))

    def _is_worth_climbing(self) -> bool:
        if not self._least:
            return True
        rates = [flops / seconds for flops, seconds in zip(self._flops, self._least, strict=False)]
        gain = rates[-1] / rates[-2] if len(rates) > 1 else math.inf
        return any(self._least[-1] < seconds and gain > enough for seconds, enough in _GAIN_WORTH_A_CALL_OF)


def climb_all(ladders: Sequence[Ladder], budget_seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
    """Climb every ladder, then repeat them in turn until the time is over.

    Args:
        ladders: whose `rate` says the result.
        budget_seconds: after which nothing is repeated any more. The climb and two rounds are always made.
        now: the clock that the budget is read from.
    """
    start = now()
    for ladder in ladders:
        ladder.climb()
    for count, ladder in enumerate(cycle(ladders)):
        if count >= _LEAST_ROUNDS * len(ladders) and now() - start >= budget_seconds:
            return
        ladder.repeat()
