"""MNIST's four files: found gzipped or not, checked against each other, and named where they can be fetched."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evener.data.mnist import read_mnist
from evener.records.errors import InvalidFile, InvalidValue, MissingFile
from support.refusals import refused

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist-idx"
IMAGES = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
LABELS = np.array([4, 0, 9], np.uint8)


def write_idx(file: Path, array: NDArray[Any]) -> None:
    header = bytes([0, 0, {"uint8": 8, "int8": 9}[array.dtype.name], array.ndim])
    raw = header + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else raw)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_images_and_labels_are_read_gzipped_or_not(suffix: str, tmp_path: Path) -> None:
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", IMAGES)
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", LABELS)
    images, labels = read_mnist(tmp_path, "test")
    np.testing.assert_array_equal(images, IMAGES, strict=True)
    np.testing.assert_array_equal(labels, LABELS, strict=True)


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (IMAGES[:, :27], LABELS, "train-images-idx3-ubyte holds 3x27x28 of uint8; expected images, Nx28x28 of uint8"),
        (IMAGES.astype(np.int8), LABELS, "holds 3x28x28 of int8; expected images, Nx28x28 of uint8"),
        (IMAGES, LABELS[:2], "train-labels-idx1-ubyte holds 2 of uint8; expected 3 labels 0 to 9 of uint8"),
        (IMAGES, LABELS + np.uint8(1), "train-labels-idx1-ubyte holds 3 of uint8; expected 3 labels 0 to 9 of uint8"),
        (IMAGES, LABELS.astype(np.int8), "holds 3 of int8; expected 3 labels 0 to 9 of uint8"),
    ],
)
def test_files_whose_content_contradicts_their_name_are_refused(
    images: NDArray[Any], labels: NDArray[Any], sentence: str, tmp_path: Path
) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    with pytest.raises(InvalidFile, match=re.escape(sentence)):
        read_mnist(tmp_path, "train")


def test_missing_file_error_names_source_and_folder(tmp_path: Path) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    expected = (
        f"MNIST is not in {tmp_path} (train-labels-idx1-ubyte.gz is missing): fetch train-images-idx3-ubyte.gz, "
        "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz from "
        "https://ossci-datasets.s3.amazonaws.com/mnist/ into that folder, "
        "or name another with --data DIR"
    )
    with pytest.raises(MissingFile, match=re.escape(expected)):
        read_mnist(tmp_path, "train")


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with refused(InvalidValue):
        read_mnist(tmp_path, "val")  # type: ignore[arg-type]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"MNIST is not in {REAL}")
def test_the_real_test_set_has_the_published_counts() -> None:
    images, labels = read_mnist(REAL, "test")
    assert images.shape == (10000, 28, 28)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"MNIST is not in {REAL}")
def test_the_real_training_set_has_the_published_counts_and_pixels() -> None:
    images, labels = read_mnist(REAL, "train")
    assert images.shape == (60000, 28, 28)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert images.mean() / 255 == pytest.approx(0.13066, abs=5e-6)
