"""The digits inside the package: whole, as published, and split into like parts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from evener.data.digits import load_digits, split_digits

COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_complete_and_as_published() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype.name) == ((1797, 8, 8), "uint8")
    assert (labels.shape, labels.dtype.name) == ((1797,), "uint8")
    assert (images.min(), images.max()) == (0, 16)
    assert np.bincount(labels).tolist() == COUNTS
    assert images.sum() == 561718
    assert images[0].tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]


def test_split_is_four_fifths_to_one_fifth_of_every_class() -> None:
    _, labels = load_digits()
    train, validation = split_digits(labels)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(1797))
    assert len(train) in (1437, 1438)
    for count, got in zip(COUNTS, np.bincount(labels[train]), strict=True):
        assert abs(got - 0.8 * count) < 1


def test_the_split_follows_its_seed() -> None:
    _, labels = load_digits()
    first, again, other = (split_digits(labels, seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_readers_and_shares_work_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from evener.data.mnist import read_idx
from evener.data.mnist import read_mnist
from evener.data.digits import load_digits, split_digits
print(len(split_digits(load_digits()[1])[1]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("359", "")
