"""How long to wait before dialling again: longer each time, and never all nodes at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def pauses(random: Random, first: float = 0.1, longest: float = 10.0) -> Iterator[float]:
    """Seconds to wait before each further try: doubling up to `longest`, each drawn from its upper half."""
    pause = first
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, longest)
