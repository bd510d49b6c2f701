"""Task `tiny-imagenet`: torchvision's ResNets on Tiny-ImageNet-200, 200 classes of 64x64 JPEG images.

The images are decoded when they are asked for.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD
from torch.utils.data import Dataset

from evener.data.tasks.load import needing_extras
from evener.data.tasks.parts import one_cycle
from evener.records.errors import InvalidFile, MissingExtra, MissingFile, require, require_one_of
from evener.records.task import Task

FOLDER = Path("data/tiny-imagenet-200")
CLASSES = 200
SOURCE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
SIDE = 64
PADDING = 8
MEAN = torch.tensor([0.480, 0.448, 0.398]).view(3, 1, 1)
STD = torch.tensor([0.275, 0.267, 0.280]).view(3, 1, 1)


def task(
    data_dir: Path | None = None,
    model: str = "resnet18",
    small_stem: bool = False,
    augment: bool = True,
    cache: bool = False,
) -> Task:
    """Classifies Tiny-ImageNet-200.

    Args:
        data_dir: the unpacked folder tiny-imagenet-200, or that in which it lies; data/tiny-imagenet-200 by default.
        model: a ResNet of torchvision: resnet18 to resnet152, resnext50_32x4d, wide_resnet50_2 ...
        small_stem: begin with a 3x3 convolution of stride 1 instead of 7x7 of stride 2 and a pooling: four times the
            rows and columns for all later layers, sixteen times the work, and better suited to 64x64 images.
        augment: flip and shift the training images at random.
        cache: keep decoded images in memory, 1.2 GB for the whole training set.

    Raises:
        InvalidValue: there is no such model.
        MissingExtra: torchvision is not installed, or does not load.
        MissingFile: (when the data are first used) the folder is not there; says what to fetch from where.
    """
    models = _torchvision_models()
    known = models.list_models(include=["resn*", "wide_resnet*"])
    require_one_of("model", model, known)
    return Task(
        name=f"tiny-imagenet-{model}",
        model=partial(resnet, model, small_stem),
        loss=cross_entropy,
        train_data=partial(TinyImageNet, data_dir or FOLDER, "train", augment=augment, cache=cache),
        validation_data=partial(TinyImageNet, data_dir or FOLDER, "val", cache=cache),
        optimizer=partial(SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
        scheduler=one_cycle,
        batch_size=128,
        epochs=30,
    )


def resnet(name: str, small_stem: bool) -> nn.Module:
    """The ResNet `name` with 200 outputs, untrained, [N, 3, 64, 64] -> [N, 200]."""
    model: nn.Module = _torchvision_models().get_model(name, weights=None, num_classes=CLASSES)
    if small_stem:
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def _torchvision_models() -> ModuleType:
    with needing_extras():
        try:
            from torchvision import models
        except (RuntimeError, OSError) as error:
            raise MissingExtra(
                f"torchvision is installed but does not load ({error}): install a torchvision that was built for this "
                "PyTorch, see https://pytorch.org/get-started/locally"
            ) from error
    module: ModuleType = models
    return module


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
    with needing_extras():
        from PIL import Image
    module: ModuleType = Image
    return module


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
