"""Tiny-ImageNet-200's folder: classes, colours, damage and absence, random transforms, and the real images."""

from __future__ import annotations

import pickle
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evener.data.tasks.tiny_imagenet import MEAN, STD, TinyImageNet
from evener.records.errors import InvalidFile, InvalidValue, MissingExtra, MissingFile
from evener.records.version import pip_install
from support.refusals import refused

REAL = Path(__file__).resolve().parents[3].parent / "shared/data/tiny-imagenet-200-subset/tiny-imagenet-200.tar"
COLOURS = {"n02": (250, 10, 10), "n01": (10, 10, 250)}  # wnids.txt is not in alphabetical order
SOURCE = "fetch http://cs231n.stanford.edu/tiny-imagenet-200.zip and unpack it into "


def write_image(file: Path, colour: tuple[int, int, int], mode: str = "RGB", side: int = 64) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).convert(mode).save(file, format="JPEG", quality=95)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for name, colour in COLOURS.items():
        for number in range(2):
            write_image(folder / "train" / name / "images" / f"{name}_{number}.JPEG", colour)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    write_image(folder / "val" / "images" / "val_7.JPEG", COLOURS["n01"])
    write_image(folder / "val" / "images" / "val_3.JPEG", COLOURS["n02"])
    (folder / "val" / "val_annotations.txt").write_text("val_7.JPEG\tn01\t0\t0\t9\t9\nval_3.JPEG\tn02\t0\t0\t9\t9\n")
    return folder


def colour_of(image: torch.Tensor) -> list[float]:
    """The middle pixel, as bytes."""
    return [round(value) for value in ((image * STD + MEAN) * 255)[:, 32, 32].tolist()]


def test_training_images_are_normalised_and_numbered_in_the_order_of_wnids(root: Path) -> None:
    data = TinyImageNet(root, "train")
    assert (len(data), data.targets) == (4, [0, 0, 1, 1])
    image, label = data[3]
    assert (image.shape, image.dtype, label) == ((3, 64, 64), torch.float32, 1)
    np.testing.assert_allclose(colour_of(image), COLOURS["n01"], atol=4)


def test_training_images_are_sorted_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(root / "train" / "n02" / "images" / "n02_0.JPEG", (0, 200, 0))
    listing = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(sorted(listing(path, pattern), reverse=True)))
    data = TinyImageNet(root, "train")
    np.testing.assert_allclose(colour_of(data[0][0]), (0, 200, 0), atol=4)
    np.testing.assert_allclose(colour_of(data[1][0]), COLOURS["n02"], atol=4)


def test_validation_images_follow_the_annotations(root: Path) -> None:
    data = TinyImageNet(root, "val")
    assert data.targets == [1, 0]
    np.testing.assert_allclose(colour_of(data[0][0]), COLOURS["n01"], atol=4)
    np.testing.assert_allclose(colour_of(data[1][0]), COLOURS["n02"], atol=4)


def test_parent_folder_is_accepted(root: Path) -> None:
    assert len(TinyImageNet(root.parent, "train")) == 4


def test_greyscale_images_become_rgb(root: Path) -> None:
    write_image(root / "val" / "images" / "val_7.JPEG", (90, 90, 90), mode="L")
    image, _ = TinyImageNet(root, "val")[0]
    np.testing.assert_allclose(colour_of(image), (90, 90, 90), atol=1)


def test_uncached_images_are_read_on_every_access(root: Path) -> None:
    data = TinyImageNet(root, "val")
    data[0]
    file = root / "val" / "images" / "val_7.JPEG"
    file.unlink()
    with pytest.raises(MissingFile, match=re.escape(f"{file} was there and is no longer: unpack http://cs231n")):
        data[0]


def test_cached_images_are_decoded_once(root: Path) -> None:
    data = TinyImageNet(root, "val", cache=True)
    first, _ = data[0]
    (root / "val" / "images" / "val_7.JPEG").unlink()
    assert torch.equal(data[0][0], first)


def test_dataset_can_be_pickled_for_loader_processes(root: Path) -> None:
    data = TinyImageNet(root, "val", cache=True)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[1][0], data[1][0])


def make_gradient(file: Path) -> torch.Tensor:
    """Writes an image whose rows and columns all differ; returns it normalised, as decoded."""
    rows, columns = np.mgrid[0:64, 0:64] * 4
    Image.fromarray(np.stack([rows, columns, columns], axis=-1).astype(np.uint8)).save(file, format="JPEG", quality=95)
    pixels = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    return (pixels / 255 - MEAN) / STD


def test_augmented_images_are_shifted_and_flipped_copies(root: Path) -> None:
    plain = make_gradient(root / "train" / "n02" / "images" / "n02_0.JPEG")
    framed = torch.nn.functional.pad(torch.stack([plain, plain.flip(-1)]), [8] * 4)
    places = {
        framed[flipped, :, top : top + 64, left : left + 64].numpy().tobytes(): (flipped, top, left)
        for flipped in (0, 1)
        for top in range(17)
        for left in range(17)
    }
    data = TinyImageNet(root, "train", augment=True, cache=True)
    torch.manual_seed(0)
    seen = [places[data[0][0].numpy().tobytes()] for _ in range(300)]
    for values, expected in zip(zip(*seen, strict=True), (range(2), range(17), range(17)), strict=True):
        assert set(values) == set(expected)
    assert 100 < sum(flipped for flipped, _, _ in seen) < 200


def test_augmentation_follows_the_default_generator_of_torch(root: Path) -> None:
    make_gradient(root / "train" / "n02" / "images" / "n02_0.JPEG")
    data = TinyImageNet(root, "train", augment=True)
    images = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        images.append(data[0][0])
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_plain_images_draw_no_random_numbers(root: Path) -> None:
    before = torch.get_rng_state()
    TinyImageNet(root, "train")[0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("gone", "split"),
    [
        ("wnids.txt", "train"),
        ("train/n01/images/*.JPEG", "train"),
        ("val/val_annotations.txt", "val"),
        ("val/images/val_3.JPEG", "val"),
    ],
)
def test_missing_part_is_named_with_its_source_and_folder(gone: str, split: str, root: Path) -> None:
    for file in list(root.glob(gone)):
        file.unlink()
    sentence = f"Tiny-ImageNet-200 is not whole: {root / gone} is missing; {SOURCE}{root.parent}, or name the folder"
    with pytest.raises(MissingFile, match=re.escape(sentence)):
        TinyImageNet(root, split)  # type: ignore[arg-type]


def test_missing_folder_error_names_the_folder_for_unpacking(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=re.escape(f"{SOURCE}{tmp_path / 'here'}, or")):
        TinyImageNet(tmp_path / "here", "train")


def test_annotation_of_an_unknown_class_is_named_by_line(root: Path) -> None:
    annotations = root / "val" / "val_annotations.txt"
    annotations.write_text("val_7.JPEG\tn01\nval_3.JPEG\tn99\n")
    with pytest.raises(InvalidFile, match=re.escape(f"{annotations} line 2: class 'n99' is not one of those in")):
        TinyImageNet(root, "val")


def test_class_list_that_is_not_text_is_refused(root: Path) -> None:
    (root / "wnids.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidFile, match=re.escape(f"{root / 'wnids.txt'} is not a text file: ")):
        TinyImageNet(root, "val")


def test_a_damaged_image_is_named(root: Path) -> None:
    file = root / "val" / "images" / "val_7.JPEG"
    for content in (file.read_bytes()[:400], b"<html>"):
        file.write_bytes(content)
        with pytest.raises(InvalidFile, match=re.escape(f"{file} is not an image that Pillow can read (")):
            TinyImageNet(root, "val")[0]


def test_image_of_the_wrong_size_is_named(root: Path) -> None:
    file = root / "val" / "images" / "val_7.JPEG"
    write_image(file, (1, 2, 3), side=32)
    with pytest.raises(InvalidFile, match=re.escape(f"{file} is 32x32 pixels; Tiny-ImageNet-200 has 64x64")):
        TinyImageNet(root, "val")[0]


def test_an_unknown_split_is_refused(root: Path) -> None:
    with refused(InvalidValue):
        TinyImageNet(root, "test")  # type: ignore[arg-type]


def test_missing_pillow_error_names_the_install_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    sentence = f"Pillow, which reads the images, is not installed: {pip_install('vision')}"
    with pytest.raises(MissingExtra, match=re.escape(sentence)):
        TinyImageNet(root, "val")


@pytest.mark.skipif(not REAL.is_file(), reason=f"there is no {REAL}")
def test_real_images_decode_and_are_normalised(tmp_path: Path) -> None:
    with tarfile.open(REAL) as archive:
        folder = "tiny-imagenet-200"
        wanted = {f"{folder}/wnids.txt"}
        kept: list[str] = []
        for member in archive:  # the tar has wnids.txt, then words, then train/ class by class
            if member.name in wanted or any(f"/{name}/images/" in member.name for name in kept):
                archive.extract(member, tmp_path, filter="data")
            if member.name == f"{folder}/wnids.txt":
                kept = (tmp_path / member.name).read_text().split()[:3]
            if sum(1 for _ in tmp_path.rglob("*.JPEG")) == 300:
                break
    (tmp_path / folder / "wnids.txt").write_text("\n".join(kept))
    data = TinyImageNet(tmp_path, "train")
    images = torch.stack([data[index][0] for index in range(len(data))])
    assert data.targets == [0] * 100 + [1] * 100 + [2] * 100
    assert images.shape == (300, 3, 64, 64)
    assert images.mean().abs() < 0.3
    assert 0.8 < images.std() < 1.2
