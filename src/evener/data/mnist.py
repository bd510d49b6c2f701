"""MNIST: 70 000 handwritten digits, in the four IDX files in which it was published."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evener.records.errors import InvalidFile, MissingFile, require

ELEMENTS = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Third byte of the magic number -> NumPy type of an element, big-endian."""

MOST_DIMENSIONS = 32

PIECE_BYTES = 1 << 18
"""What is unpacked at a time: a machine of little memory holds the elements once."""


def read_idx(path: Path) -> NDArray[Any]:
    """The array in the IDX file `path`, with the shape and element type that its header states.

    A file that begins like gzip is unpacked, whatever its name. The array is writable and in native byte order.

    Args:
        path: the file, gzipped or plain.

    Raises:
        MissingFile: the file cannot be read.
        InvalidFile: it is not IDX, is damaged, or holds fewer or more bytes than its header states.
    """
    with _unpacked(path) as file:
        kind, shape = _header(path, file)
        array = _room(shape, kind)
        held = _fill(array, file) + _count(file)
    expected = math.prod(shape) * kind.itemsize
    if held != expected:
        size = "x".join(map(str, shape))
        raise InvalidFile(
            f"{path} holds {held} bytes of elements; its header ({size} of {kind.name}) "
            f"states {expected}: fetch it again"
        )
    return array.astype(kind.newbyteorder("="), copy=False)


@contextmanager
def _unpacked(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidFile(f"{path} is a damaged gzip file ({error}): fetch it again") from error
    except OSError as error:
        raise MissingFile(f"cannot read {path}: {error.strerror}") from error


def _header(path: Path, file: BufferedIOBase) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Element type and shape."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in ELEMENTS or not 1 <= magic[3] <= MOST_DIMENSIONS:
        raise InvalidFile(
            f"{path} is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}; expected 00 00, "
            f"an element type ({', '.join(f'{code:02x}' for code in ELEMENTS)}) "
            f"and 01 to {MOST_DIMENSIONS:02x} dimensions"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise InvalidFile(
            f"{path} ends inside its header: {4 + len(sizes)} bytes, expected {4 + 4 * magic[3]} or more: "
            "fetch it again"
        )
    return np.dtype(ELEMENTS[magic[2]]), tuple(int(size) for size in np.frombuffer(sizes, dtype=">u4"))


def _room(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Memory for what the header states; none if no machine has so much, for then the file does not hold it either."""
    try:
        return np.empty(shape, kind)
    except (MemoryError, ValueError):
        return np.empty(0, kind)


def _fill(array: NDArray[Any], file: BufferedIOBase) -> int:
    """Read elements until the array is full or the file ends; returns their bytes."""
    flat, held = array.reshape(-1).view(np.uint8).data, 0
    while held < len(flat) and (count := file.readinto(flat[held : held + PIECE_BYTES])):
        held += count
    return held


def _count(file: BufferedIOBase) -> int:
    """The bytes up to the end, where gzip compares its checksum."""
    return sum(map(len, iter(lambda: file.read(PIECE_BYTES), b"")))


SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DIGITS = 10
MNIST_FOLDER = Path("data/mnist")
"""Where the files lie, unless somebody says otherwise."""

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


def require_mnist(folder: Path) -> None:
    """Raise MissingFile unless the four files are in `folder`."""
    for pair in FILES.values():
        for name in pair:
            _find(folder, name)


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    names = ", ".join(f"{name}.gz" for pair in FILES.values() for name in pair)
    raise MissingFile(
        f"MNIST is not in {folder} ({name}.gz is missing): fetch {names} from {SOURCE} into that folder, "
        "or name another with --data DIR"
    )


def _describe(array: NDArray[np.generic]) -> str:
    return f"{'x'.join(map(str, array.shape))} of {array.dtype.name}"
