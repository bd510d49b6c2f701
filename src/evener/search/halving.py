"""Which trials continue: successive halving by ASHA (Li et al. 2020) and Hyperband (Li et al. 2018). Pure.

    epochs 27, eta 3:   rungs 1, 3, 9, 27         the best third of the trials that reach a rung continues

A trial is compared with the trials that were known when it was drawn, not with those that have reached the rung by now.
Pruning therefore does not depend on the number of nodes, on their speeds, or on delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evener.records.errors import require

Pruning = Literal["asha", "hyperband", "none"]
ETA = 3
"""One trial in this many continues."""


def rungs(epochs: int, eta: int = ETA) -> tuple[int, ...]:
    """Return the epochs after which trials are compared: ceil(epochs / eta^i), ascending up to the full budget."""
    require(epochs > 0, "--epochs", epochs, "positive")
    descending = [epochs]
    while descending[-1] > 1:
        descending.append(-(-descending[-1] // eta))
    return tuple(reversed(descending))


def rungs_of(number: int, epochs: int, pruning: Pruning) -> tuple[int, ...]:
    """Return the rungs of a trial: all for ASHA, fewer in later brackets of Hyperband, the last without pruning."""
    every = rungs(epochs)
    if pruning == "none":
        return every[-1:]
    return every if pruning == "asha" else every[bracket_of(number, len(every)) :]


def bracket_of(number: int, brackets: int, eta: int = ETA) -> int:
    """Return the bracket of Hyperband to which a trial belongs; bracket b skips the first b rungs.

    Bracket b of B receives trials in proportion to B / (B - b) * eta^(B - 1 - b), as in the paper's table. D'Hondt's
    rule distributes them, so that any few consecutive trials include each bracket in proportion.
    """
    weights = [brackets / (brackets - b) * eta ** (brackets - 1 - b) for b in range(brackets)]
    counts = [0] * brackets
    for _ in range(number + 1):
        chosen = max(range(brackets), key=lambda b: weights[b] / (counts[b] + 1))
        counts[chosen] += 1
    return chosen


def survives(score: float, others: Sequence[float], *, larger_is_better: bool, eta: int = ETA) -> bool:
    """Return whether a trial is among the best of those that reached its rung: one in `eta`, but at least one.

    Args:
        score: its score at the rung.
        others: scores of the trials that it is compared with.
        larger_is_better: whether larger scores are better.
        eta: one trial in this many continues.
    """
    survivors = max(1, (len(others) + 1) // eta)
    better = sum(other > score if larger_is_better else other < score for other in others)
    return better < survivors
