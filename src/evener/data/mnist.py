"""MNIST: 70 000 handwritten digits, in the four IDX files in which it was published."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evener.data.idx import read_idx
from evener.errors import InvalidFile, MissingFile, require

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DIGITS = 10

Bytes = NDArray[np.uint8]


def read_mnist(folder: Path, split: Literal["train", "test"]) -> tuple[Bytes, Bytes]:
    """Images [N, 28, 28] with values 0 to 255, and their labels [N], 0 to 9: 60 000 to train on, 10 000 to test with.

    Args:
        folder: holds the four files, gzipped (`.gz`) or unpacked.
        split: "train" or "test".

    Raises:
        MissingFile: a file is not there; says which to fetch from where.
        InvalidFile: a file is damaged, or is not what its name says.
    """
    require(split in FILES, "split", split, "'train' or 'test'")
    images_file, labels_file = (_find(folder, name) for name in FILES[split])
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise InvalidFile(f"{images_file} holds {_describe(images)}; expected images, Nx28x28 of uint8")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or (labels >= DIGITS).any():
        raise InvalidFile(f"{labels_file} holds {_describe(labels)}; expected {len(images)} labels 0 to 9 of uint8")
    return images, labels


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    names = ", ".join(f"{name}.gz" for pair in FILES.values() for name in pair)
    raise MissingFile(
        f"MNIST is not in {folder} ({name}.gz is missing): fetch {names} from {SOURCE} into that folder, "
        "or name the folder that has them with --data DIR"
    )


def _describe(array: NDArray[np.generic]) -> str:
    return f"{'x'.join(map(str, array.shape))} of {array.dtype.name}"
