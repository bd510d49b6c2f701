"""Handwritten digits that come with Evener, so that something real can be trained before anything is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.data.shares import class_balanced_shares


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [1797, 8, 8] with values 0 (paper) to 16 (ink), and their labels [1797], 0 to 9.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
    https://doi.org/10.24432/C50P49 (its test set); licence CC BY 4.0, see DIGITS_LICENSE.md beside this file.
    """
    with np.load(Path(__file__).with_name("optical_digits.npz"), allow_pickle=False) as archive:
        return archive["images"], archive["labels"]


def split_digits(labels: NDArray[Any], seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training samples (80 %) and of the validation samples (20 %), ascending.

    Both parts have every class in the same proportion as the whole, to within one sample.

    Args:
        labels: class of each sample, [N].
        seed: the same seed gives the same split.
    """
    train, validation = class_balanced_shares(labels, [4, 1], seed)
    return train, validation
