"""Tiny-ImageNet-200 as it is unpacked: 200 classes of 64x64 JPEG images, decoded when they are asked for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from evener.errors import InvalidFile, MissingExtra, MissingFile, require

SOURCE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
SIDE = 64
PADDING = 8
MEAN = torch.tensor([0.480, 0.448, 0.398]).view(3, 1, 1)
STD = torch.tensor([0.275, 0.267, 0.280]).view(3, 1, 1)


class TinyImageNet(Dataset[tuple[Tensor, int]]):
    """Pairs of an image, float32 [3, 64, 64] with mean 0 and deviation 1 per channel, and its class.

    The classes are numbered in the order of `wnids.txt`. Greyscale images are converted to RGB.

    Args:
        root: the unpacked folder `tiny-imagenet-200`, or the folder in which it lies.
        split: "train" (train/<wnid>/images/*.JPEG) or "val" (val/images, named by val/val_annotations.txt).
        augment: flip every other image and shift it by up to 8 pixels, at random from torch's default generator.
        cache: keep decoded images in memory, 12 kB each; every worker process of a loader keeps its own.

    Attributes:
        targets: class of every sample, 0 to 199.

    Raises:
        MissingFile: the folder or a part of it is not there; says what to fetch and where to unpack it.
        InvalidFile: a list in it is wrong, or (later, from indexing) an image is damaged or not 64x64.
        MissingExtra: Pillow is not installed.
    """

    def __init__(
        self, root: Path, split: Literal["train", "val"], *, augment: bool = False, cache: bool = False
    ) -> None:
        require(split in ("train", "val"), "split", split, "'train' or 'val'")
        _pillow()
        folder = _find(root)
        classes = {name: number for number, name in enumerate(_lines(folder / "wnids.txt"))}
        samples = _train_samples(folder, classes) if split == "train" else _validation_samples(folder, classes)
        self._files = [file for file, _ in samples]
        self.targets = [number for _, number in samples]
        self._augment = augment
        self._decoded: dict[int, Tensor] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (self._pixels(index) / 255 - MEAN) / STD
        return (_shift(_flip(image)) if self._augment else image), self.targets[index]

    def _pixels(self, index: int) -> Tensor:
        """The image as bytes, [3, 64, 64]."""
        if self._decoded is None:
            return _decode(self._files[index])
        if index not in self._decoded:
            self._decoded[index] = _decode(self._files[index])
        return self._decoded[index]


def _pillow() -> ModuleType:
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise MissingExtra("Pillow, which reads the images, is not installed: pip install 'evener[vision]'") from error
    return PIL.Image


def _find(root: Path) -> Path:
    """The folder that holds wnids.txt: `root`, or tiny-imagenet-200 in it."""
    for folder in (root, root / "tiny-imagenet-200"):
        if (folder / "wnids.txt").is_file():
            return folder
    raise _missing(root / "wnids.txt", root)


def _missing(path: Path, root: Path) -> MissingFile:
    target = root.parent if root.name == "tiny-imagenet-200" else root
    return MissingFile(
        f"Tiny-ImageNet-200 is not whole: {path} is missing; fetch {SOURCE} and unpack it into {target}, "
        "or name the folder that has it with --data DIR"
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidFile(f"{path} is not a text file: {error}") from error


def _train_samples(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    samples = []
    for name, number in classes.items():
        images = folder / "train" / name / "images"
        files = sorted(images.glob("*.JPEG"))
        if not files:
            raise _missing(images / "*.JPEG", folder)
        samples += [(file, number) for file in files]
    return samples


def _validation_samples(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    annotations, images = folder / "val" / "val_annotations.txt", folder / "val" / "images"
    if not annotations.is_file():
        raise _missing(annotations, folder)
    present = {file.name for file in images.glob("*.JPEG")}
    samples = []
    for number, line in enumerate(_lines(annotations), start=1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in classes:
            raise InvalidFile(f"{annotations} line {number}: class {label!r} is not one of those in wnids.txt")
        if name not in present:
            raise _missing(images / name, folder)
        samples.append((images / name, classes[label]))
    return samples


def _decode(file: Path) -> Tensor:
    try:
        with _pillow().open(file) as image:
            pixels = np.array(image.convert("RGB"))
    except FileNotFoundError as error:
        raise MissingFile(f"{file} was there and is no longer: unpack {SOURCE} again") from error
    except OSError as error:
        raise InvalidFile(f"{file} is not an image that Pillow can read ({error}): unpack {SOURCE} again") from error
    if pixels.shape != (SIDE, SIDE, 3):
        rows, columns = pixels.shape[:2]
        raise InvalidFile(f"{file} is {columns}x{rows} pixels; Tiny-ImageNet-200 has {SIDE}x{SIDE}")
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _flip(image: Tensor) -> Tensor:
    """Left and right exchanged, every other time."""
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def _shift(image: Tensor) -> Tensor:
    """Moved by up to PADDING pixels; what comes in at the edge is the mean colour."""
    top, left = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
    return pad(image, [PADDING] * 4)[:, top : top + SIDE, left : left + SIDE]
