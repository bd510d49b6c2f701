"""Contributions of a small model, and their mean."""

from __future__ import annotations

import numpy as np

from evener.agreements.layout import ArraySpec, Flat, StateLayout
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging


def layout(singles: int, doubles: int = 3) -> StateLayout:
    return StateLayout(
        entries=(
            ArraySpec(name="tracked", shape=(2,), dtype="int64", kind="counter"),
            ArraySpec(name="d", shape=(doubles,), dtype="float64", kind="parameter"),
            ArraySpec(name="w", shape=(singles,), dtype="float32", kind="parameter"),
            ArraySpec(name="mean", shape=(2,), dtype="float32", kind="statistic"),
        )
    )


def sources(count: int, of: StateLayout, seed: int = 0) -> list[Flat]:
    draw, found = np.random.default_rng(seed), []
    for _ in range(count):
        flat = Flat(of)
        for array in flat.floats:
            array[:] = draw.standard_normal(array.size)
        flat.counters[:] = draw.integers(0, 100, flat.counters.size)
        found.append(flat)
    return found


def merged(flats: list[Flat], weights: list[float], threads: int = 1) -> Flat:
    out = Flat(flats[0].layout)
    with ThreadPool(threads) as cores:
        assert Merging(out, flats, weights, cores).finish() == ()
    return out
