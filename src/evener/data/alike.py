"""Whether all nodes hold the same: samples, batches, models. What differs is found by numbers that are made of it.

Every node reads the samples of its share by itself. Data that are shuffled or split at random without a seed are others
on every node: some samples would be used twice, some never, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.data.loader import read_samples
from evener.records.errors import InvalidInput


def require_alike(group: Group, value: float, what: str) -> None:
    """Raise InvalidInput unless every rank has the same `value`; all of them call this."""
    other = first_other(rows_of_ranks(group, [value]))
    if other is not None:
        raise InvalidInput(f"{what}: nodes {group.nodes[0]} and {group.nodes[other[0]]} have different ones")


def require_same_data(group: Group, dataset: Dataset[Any], seed: int, what: str) -> None:
    """Hold the number of samples, and the first, the middle and the last of them, against those of the other nodes.

    Random numbers are seeded alike before a sample is read. One that differs from itself when it is read again draws
    from a generator of its own, and says nothing.

    Args:
        group: all of whose ranks call this.
        dataset: map-style.
        seed: of the run.
        what: the data are, for the sentence.

    Raises:
        InvalidInput: they differ.
    """
    count = len(dataset)  # type: ignore[arg-type]
    difference = first_other(rows_of_ranks(group, [count]))
    if difference is not None:
        raise _others(group, difference[0], what, "there are more or fewer of them")
    indices = sorted({0, count // 2, count - 1}) if count else []
    difference = first_other(rows_of_ranks(group, [steady_print(dataset, i, seed) for i in indices]))
    if difference is not None:
        raise _others(group, difference[0], what, f"sample {indices[difference[1]]} is another")


def steady_print(dataset: Dataset[Any], index: int, seed: int) -> float:
    """The print of a sample; NaN if it is another every time."""
    once, again = (print_of(read_samples(dataset, np.array([index]), seed, epoch=0)) for _ in range(2))
    return once if once == again else float("nan")


def _others(group: Group, rank: int, what: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"the {what} of {group.nodes[rank]} are not those of {group.nodes[0]}: {why}. Seed what splits or shuffles "
        "them, as in random_split(data, sizes, torch.Generator().manual_seed(0)), or give all nodes the same files"
    )


def rows_of_ranks(group: Group, values: Iterable[float]) -> NDArray[np.float64]:
    """Every rank's values, shape (ranks, values)."""
    rows = group.all_gather_bytes(np.asarray(list(values), dtype=np.float64).tobytes())
    return np.stack([np.frombuffer(row) for row in rows])


def first_other(rows: NDArray[np.float64]) -> tuple[int, int] | None:
    """The first rank with a value that the first rank has not, and its place; None without one. NaN is like all."""
    same = np.isclose(rows, rows[0], rtol=1e-9, atol=0.0) | np.isnan(rows) | np.isnan(rows[0])
    others = np.argwhere(~same)
    return (int(others[0][0]), int(others[0][1])) if len(others) else None
