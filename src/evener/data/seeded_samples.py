"""A data set whose random transforms are independent of each other: each sample has its own random numbers."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from evener.data.loader import read_samples
from evener.records.errors import InvalidInput


class SeededSamples(Dataset[Any]):
    """The samples of `dataset`, random transforms drawn from (seed, epoch, index).

    Args:
        dataset: map-style, with whole numbers as indices.
        seed: of the run.

    Attributes:
        epoch: whose samples are read next; `set_epoch` of a data set that has it is called.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset: Any = dataset
        self.epoch, self._seed = 0, seed

    def __len__(self) -> int:
        return sample_count(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        return read_samples(self.dataset, np.asarray(indices, dtype=np.int64), self._seed, self.epoch)


def sample_count(data: object) -> int:
    """Samples of a map-style data set. Raises InvalidInput: it does not say how many."""
    if not isinstance(data, Sized):
        raise InvalidInput(f"{type(data).__name__} has no len(): give the class of the data a __len__")
    return len(data)
