"""How sure predictions are, by the source of their constants, as measured once over many cells (docs/lab/oracle.md).

spread    four of five steps take between predicted / (1 + spread) and predicted * (1 + spread)
alike     two ways to divide one job are alike if their predictions differ by no larger factor than 1 + alike: of
          pairs with such a difference, one of five or more is the other way round
"""

from __future__ import annotations

from typing import NamedTuple


class Uncertainty(NamedTuple):
    """Relative errors of predictions from one source.

    Attributes:
        spread: of a step; see above.
        alike: of the ratio of two ways to divide one job.
    """

    spread: float
    alike: float


REHEARSED = Uncertainty(spread=0.13, alike=0.16)
"""Of a run that has measured the parts of its step: 111 cells, 342 pairs."""
FORMULAS = Uncertainty(spread=1.4, alike=0.44)
"""Of the formulas with a profile that `evener benchmark` has measured on the machines: 63 cells, 174 pairs. Steps on
processors are predicted too short throughout.
"""
