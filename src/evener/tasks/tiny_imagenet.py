"""Task `tiny-imagenet`: torchvision's ResNets on 200 classes of 64x64 images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from evener.data.image_folder import TinyImageNet
from evener.errors import MissingExtra, require
from evener.task import Task
from evener.tasks.extras import needing_extras
from evener.tasks.schedule import one_cycle

FOLDER = Path("data/tiny-imagenet-200")
CLASSES = 200


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
    require(model in known, "model", model, f"one of {', '.join(known)}")
    return Task(
        name=f"tiny-imagenet-{model}",
        model=partial(resnet, model, small_stem),
        loss=cross_entropy,
        train_data=partial(_data, data_dir or FOLDER, "train", augment, cache),
        validation_data=partial(_data, data_dir or FOLDER, "val", False, cache),
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


def _data(folder: Path, split: Literal["train", "val"], augment: bool, cache: bool) -> TinyImageNet:
    return TinyImageNet(folder, split, augment=augment, cache=cache)
