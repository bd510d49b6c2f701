"""Folders like that of Tiny-ImageNet-200, of two classes and a few images of one colour each."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

COLOURS = {"n02": (250, 10, 10), "n01": (10, 10, 250)}  # wnids.txt is not in alphabetical order


def write_image(file: Path, colour: tuple[int, int, int], mode: str = "RGB", side: int = 64) -> None:
    """An image of one colour."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).convert(mode).save(file, format="JPEG", quality=95)


def write_tiny_imagenet(folder: Path, images: int = 2) -> Path:
    """The folder, with `images` of each class to train on and one each to validate with."""
    for name, colour in COLOURS.items():
        for number in range(images):
            write_image(folder / "train" / name / "images" / f"{name}_{number}.JPEG", colour)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    write_image(folder / "val" / "images" / "val_7.JPEG", COLOURS["n01"])
    write_image(folder / "val" / "images" / "val_3.JPEG", COLOURS["n02"])
    (folder / "val" / "val_annotations.txt").write_text("val_7.JPEG\tn01\t0\t0\t9\t9\nval_3.JPEG\tn02\t0\t0\t9\t9\n")
    return folder
