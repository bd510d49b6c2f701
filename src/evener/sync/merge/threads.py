"""Merging on CPU threads, as published: the keys of the state are dealt to six threads by their index modulo six."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

NUM_THREADS = 6

A = TypeVar("A", bound=Any)
"""NumPy's arrays or PyTorch's tensors: whatever adds up."""


def merge_on_threads(states: Sequence[Mapping[str, A]]) -> dict[str, A]:
    """The mean of at least two states that have the same keys, as new arrays or tensors.

    Counters, those with `tracked` in their key, are summed and not divided, as published.
    """
    keys = list(states[0])

    def thread(index: int) -> dict[str, A]:
        return {key: _merged([state[key] for state in states], "tracked" in key) for key in keys[index::NUM_THREADS]}

    with ThreadPoolExecutor(NUM_THREADS, "evener-merge") as pool:
        parts = list(pool.map(thread, range(NUM_THREADS)))
    merged = {key: value for part in parts for key, value in part.items()}
    return {key: merged[key] for key in keys}


def _merged(values: list[A], is_counter: bool) -> A:
    total: A = values[0] + values[1]
    for value in values[2:]:
        total += value
    if not is_counter:
        total /= len(values)
    return total
