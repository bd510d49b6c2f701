"""Which trials go on: successive halving, as ASHA (Li et al. 2020) and Hyperband (Li et al. 2018) have it. Pure.

    epochs 27, eta 3:   rungs 1, 3, 9, 27         of those who reach a rung, the best third goes on

A trial is compared with those that were known when it was drawn, never with whoever happens to have come as far by now:
so what is pruned does not depend on how many nodes there are, how fast they are, or which one was late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evener.records.errors import require

Pruning = Literal["asha", "hyperband", "none"]
ETA = 3
"""One in so many goes on."""


def rungs(epochs: int, eta: int = ETA) -> tuple[int, ...]:
    """Epochs after which trials are compared, the last one the whole budget: ceil(epochs / eta^i), ascending."""
    require(epochs > 0, "--epochs", epochs, "positive")
    found = [epochs]
    while found[-1] > 1:
        found.append(-(-found[-1] // eta))
    return tuple(reversed(found))


def rungs_of(number: int, epochs: int, pruning: Pruning) -> tuple[int, ...]:
    """Of the trial of this number: all of them in ASHA, fewer in the later brackets of Hyperband, the last without."""
    every = rungs(epochs)
    if pruning == "none":
        return every[-1:]
    return every if pruning == "asha" else every[bracket_of(number, len(every)) :]


def bracket_of(number: int, brackets: int, eta: int = ETA) -> int:
    """The bracket of Hyperband to which a trial belongs: bracket b skips the first b rungs.

    Bracket b of B takes trials in proportion to B / (B - b) * eta^(B - 1 - b), as in the paper's table, dealt out by
    D'Hondt's rule, so that every few trials have their share of each.
    """
    weights = [brackets / (brackets - b) * eta ** (brackets - 1 - b) for b in range(brackets)]
    counts = [0] * brackets
    for _ in range(number + 1):
        chosen = max(range(brackets), key=lambda b: weights[b] / (counts[b] + 1))
        counts[chosen] += 1
    return chosen


def goes_on(own: float, others: Sequence[float], *, larger_is_better: bool, eta: int = ETA) -> bool:
    """Whether a trial is among the best of those that reached its rung: one in eta, and one at least.

    Args:
        own: its score there.
        others: those of the trials that it is compared with.
        larger_is_better: of scores.
        eta: one in so many goes on.
    """
    room = max(1, (len(others) + 1) // eta)
    better = sum(other > own if larger_is_better else other < own for other in others)
    return better < room
