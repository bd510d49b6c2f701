"""The class of every sample of a data set, without loading the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, TensorDataset

from evener.errors import InvalidInput


def labels_of(dataset: Dataset[Any]) -> NDArray[Any]:
    """Classes of all samples, shape (N,): the data set's `targets`, or the second tensor of a TensorDataset.

    Raises:
        InvalidInput: the data set has neither; says what to write.
    """
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return np.asarray(dataset.tensors[1])
    targets = getattr(dataset, "targets", None)
    if targets is None:
        kind = type(dataset).__name__
        raise InvalidInput(
            f"class-balanced shares need the class of every sample, and {kind} has no `targets`: set Task.labels"
        )
    return np.asarray(targets)
