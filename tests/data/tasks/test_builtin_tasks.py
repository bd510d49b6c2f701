"""The tasks that come with Evener: they learn, their sizes are as documented, and their weights follow torch's seed."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchvision_operators  # noqa: F401  before torchvision
from evener.data.tasks.load import load_task
from evener.data.tasks.parts import Normalise, ResidualBlock
from evener.data.tasks.synthetic import NoisyImages
from evener.records.errors import InvalidValue, MissingFile
from evener.records.task import Task
from support.refusals import refused

REAL_MNIST = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "mnist-idx"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small layers gain nothing from a second thread, and lose much where it waits for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(task: Task, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """The task's model after its epochs on one thread of control, and the loss of every step."""
    torch.manual_seed(seed)
    model, data = task.model(), task.train_data()
    steps = task.epochs * math.ceil(len(cast(Any, data)) / task.batch_size)
    optimizer = task.optimizer(model.parameters()) if task.optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = task.scheduler(optimizer, steps) if task.scheduler else None
    losses = []
    for _ in range(task.epochs):
        for inputs, targets in DataLoader(data, task.batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if schedule:
                schedule.step()
            losses.append(loss.item())
    return model, losses


@torch.no_grad()
def accuracy(task: Task, model: nn.Module) -> float:
    assert task.validation_data is not None
    model.eval()
    right = [(model(x).argmax(1) == y).float() for x, y in DataLoader(task.validation_data(), 500)]
    return torch.cat(right).mean().item()


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["digits", "mnist", "synthetic", "tiny-imagenet"])
def test_weights_follow_the_torch_seed(name: str) -> None:
    task = load_task(name)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(torch.cat([p.flatten() for p in task.model().parameters()]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_a_residual_block_adds_its_input_to_two_convolutions() -> None:
    block, inputs = ResidualBlock(4, batch_norm=False), torch.randn(2, 4, 5, 6)
    first, _, second = block.body
    expected = (inputs + second(first(inputs).relu())).relu()
    torch.testing.assert_close(block(inputs), expected)


# digits


def test_digits_are_normalised_and_have_integer_classes() -> None:
    inputs, targets = cast(Any, load_task("digits").train_data()).tensors
    assert (inputs.shape[1:], inputs.dtype, targets.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert inputs.mean().item() == pytest.approx(0, abs=0.01)
    assert inputs.std().item() == pytest.approx(1, abs=0.01)


def test_digits_training_and_validation_cover_all_samples_once() -> None:
    task = load_task("digits")
    assert task.validation_data is not None
    sizes = [len(cast(Any, make())) for make in (task.train_data, task.validation_data)]
    assert sizes == [1438, 359]


def test_the_digits_model_is_small_enough_to_be_sent_often() -> None:
    assert size(load_task("digits").model()) == 380_170


def test_narrow_digits_model_learns_quickly() -> None:
    task = replace(load_task("digits", options={"channels": "16", "blocks": "2"}), batch_size=32, epochs=2)
    model, losses = train(task)
    assert losses[0] > 2
    assert accuracy(task, model) > 0.9


@pytest.mark.slow
def test_default_digits_task_reaches_its_accuracy() -> None:
    task = load_task("digits")
    model, _ = train(task)
    assert accuracy(task, model) > 0.97


# mnist


def write_mnist(folder: Path, count: int) -> None:
    """Images of stripes, whose number tells the class."""
    labels = (np.arange(count) % 10).astype(np.uint8)
    images = np.zeros((count, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:: label + 2] = 200
    for kind in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{kind}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def test_mnist_stays_in_bytes_until_the_model_converts_it(tmp_path: Path) -> None:
    write_mnist(tmp_path, 20)
    task = load_task("mnist", tmp_path)
    inputs, targets = cast(Any, task.train_data()).tensors
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((20, 1, 28, 28), torch.uint8, torch.int64)
    assert task.model()(inputs).shape == (20, 10)


def test_the_normalising_layer_has_the_type_of_its_model_and_no_state() -> None:
    layer = Normalise(mean=10, std=4)
    values = torch.tensor([[18, 2]], dtype=torch.uint8)
    for kind in (torch.float32, torch.float64):
        expected = torch.tensor([[2, -2]], dtype=kind)
        torch.testing.assert_close(layer.to(kind)(values), expected, rtol=0, atol=0)
    assert layer.state_dict() == {}


def test_the_mnist_model_learns(tmp_path: Path) -> None:
    write_mnist(tmp_path, 200)
    task = replace(load_task("mnist", tmp_path), batch_size=20, epochs=8)
    model, losses = train(task)
    assert losses[0] > 2
    assert accuracy(task, model) == 1


def test_missing_mnist_is_reported_on_first_use_of_the_data(tmp_path: Path) -> None:
    sentence = f"MNIST is not in {tmp_path} (train-images-idx3-ubyte.gz is missing): fetch "
    with pytest.raises(MissingFile, match=re.escape(sentence)):
        load_task("mnist", tmp_path).train_data()


def test_mnist_is_read_from_data_mnist_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(MissingFile):
        load_task("mnist").train_data()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL_MNIST.is_dir(), reason=f"MNIST is not in {REAL_MNIST}")
def test_real_mnist_reaches_its_accuracy_after_two_epochs() -> None:
    task = replace(load_task("mnist", REAL_MNIST), epochs=2)
    model, _ = train(task)
    assert accuracy(task, model) > 0.985


# tiny-imagenet


def write_tiny_imagenet(folder: Path) -> None:
    (folder / "val").mkdir(parents=True)
    for number, name in enumerate(("n1", "n2")):
        (folder / "train" / name / "images").mkdir(parents=True)
        for index in range(4):
            colour = (60 + 100 * number, 90, 50 * index)
            Image.new("RGB", (64, 64), colour).save(folder / "train" / name / "images" / f"{index}.JPEG")
    (folder / "wnids.txt").write_text("n1\nn2\n")


def test_a_resnet_trains_on_tiny_imagenet(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    task = replace(load_task("tiny-imagenet", tmp_path, {"cache": "yes"}), batch_size=4, epochs=2)
    _, losses = train(task)
    assert losses[0] == pytest.approx(math.log(200), rel=0.3)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("options", "parameters", "rows"),
    [
        ({}, 11_279_112, 2),
        ({"small_stem": "true"}, 11_271_432, 8),
        ({"model": "resnet50"}, 23_917_832, 2),
    ],
)
def test_resnets_have_200_outputs_and_the_requested_stem(
    options: Mapping[str, str], parameters: int, rows: int
) -> None:
    with torch.device("meta"):
        model: Any = load_task("tiny-imagenet", options=options).model()
        shapes: list[torch.Size] = []
        model.layer4.register_forward_hook(lambda _module, _inputs, output: shapes.append(output.shape))
        outputs: Tensor = model(torch.zeros(2, 3, 64, 64))
    assert (outputs.shape, size(model), shapes[0][2]) == ((2, 200), parameters, rows)


def test_only_the_training_images_are_augmented(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    (tmp_path / "val" / "images").mkdir()
    (tmp_path / "val" / "val_annotations.txt").write_text("a.JPEG\tn1\n")
    Image.radial_gradient("L").resize((64, 64)).save(tmp_path / "val" / "images" / "a.JPEG")
    Image.radial_gradient("L").resize((64, 64)).save(tmp_path / "train" / "n1" / "images" / "0.JPEG")
    task = load_task("tiny-imagenet", tmp_path)
    plain = load_task("tiny-imagenet", tmp_path, {"augment": "false"})
    assert task.validation_data is not None
    torch.manual_seed(0)
    validation, augmented, bare = task.validation_data(), task.train_data(), plain.train_data()
    assert torch.equal(validation[0][0], validation[0][0])
    assert not torch.equal(augmented[0][0], augmented[0][0])
    assert torch.equal(bare[0][0], bare[0][0])


def test_model_missing_from_torchvision_is_refused_with_alternatives() -> None:
    with refused(InvalidValue):
        load_task("tiny-imagenet", options={"model": "resnet19"})


def test_missing_tiny_imagenet_is_reported_on_first_use_of_the_data(tmp_path: Path) -> None:
    with refused(MissingFile):
        load_task("tiny-imagenet", tmp_path).train_data()


# synthetic


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 3 * 32 * 9 + 64 + 3 * (2 * (32 * 32 * 9 + 64)) + 330),
        ({"batch_norm": "false", "depth": "1"}, 3 * 32 * 9 + 32 + 2 * (32 * 32 * 9 + 32) + 330),
        ({"parameters": "heavy"}, 3 * 32 * 9 + 64 + 3 * (2 * (32 * 32 * 9 + 64)) + 513 * 4096 + 40970),
        ({"kind": "mlp"}, 3072 * 32 + 2 * 32 * 32 + 3 * 64 + 330),
        ({"kind": "mlp", "parameters": "heavy", "batch_norm": "false", "depth": "1"}, 3073 * 32 + 33 * 4096 + 40970),
        ({"image": "1x5x3", "parameters": "heavy", "depth": "1"}, 9 * 32 + 64 + 2 * (9216 + 64) + 481 * 4096 + 40970),
        ({"image": "2x5x3x4", "width": "8", "depth": "1"}, 2 * 8 * 27 + 16 + 2 * (8 * 8 * 27 + 16) + 90),
        (
            {"image": "1x5x8x9", "width": "8", "depth": "1", "parameters": "heavy", "classes": "3"},
            8 * 27 + 16 + 2 * (8 * 8 * 27 + 16) + (8 * 5 * 4 * 4 + 1) * 4096 + 4097 * 3,
        ),
    ],
)
def test_synthetic_models_have_the_requested_size(options: Mapping[str, str], parameters: int) -> None:
    task = load_task("synthetic", options=options)
    model = task.model()
    inputs = torch.stack([task.train_data()[index][0] for index in range(2)])
    assert (size(model), model(inputs).shape) == (parameters, (2, int(options.get("classes", 10))))


def test_synthetic_data_follow_their_seed() -> None:
    first, again, other = (NoisyImages((1, 2, 3), 4, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first[5][0], again[5][0])
    assert not torch.equal(first[5][0], other[5][0])
    assert first.targets == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [first[index][1] for index in range(8)] == first.targets


def test_synthetic_samples_differ_and_cluster_by_class() -> None:
    data = NoisyImages((3, 8, 8), 5, 1000, seed=0)
    images = torch.stack([data[index][0] for index in range(1000)])
    assert len(np.unique(images.flatten(1).numpy(), axis=0)) == 1000
    means = torch.stack([images[label::5].mean(dim=0) for label in range(5)])
    nearest = torch.cdist(images.flatten(1), means.flatten(1)).argmin(dim=1)
    assert nearest.tolist() == data.targets


def test_synthetic_validation_has_the_training_classes_and_other_noise() -> None:
    task = load_task("synthetic", options={"samples": "12", "classes": "3", "image": "1x8x8"})
    assert task.validation_data is not None
    train_data, validation = cast(Any, task.train_data()), cast(Any, task.validation_data())
    assert (len(train_data), len(validation)) == (12, 3)
    assert validation.targets == train_data.targets[:3] == [0, 1, 2]
    every = torch.stack([data[index][0] for data in (train_data, validation) for index in range(len(data))])
    assert len(np.unique(every.flatten(1).numpy(), axis=0)) == 15


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_synthetic_tasks_can_be_learned(kind: str) -> None:
    options = {"kind": kind, "image": "1x8x8", "width": "16", "depth": "1", "classes": "4", "samples": "512"}
    task = replace(load_task("synthetic", options=options), epochs=3)
    model, losses = train(task)
    assert losses[0] > 1
    assert losses[-1] < 0.5
    assert accuracy(task, model) > 0.8


_SIZES = "image must be channels, rows and columns, such as 3x32x32, or 1x16x16x16 for volumes"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("synthetic", {"kind": "rnn"}, "kind must be cnn or mlp, got 'rnn'"),
        ("synthetic", {"parameters": "few"}, "parameters must be light or heavy, got 'few'"),
        ("synthetic", {"image": "32x32"}, f"{_SIZES}, got (32, 32)"),
        ("synthetic", {"image": "3x0x32"}, f"{_SIZES}, got (3, 0, 32)"),
        ("synthetic", {"depth": "0"}, "depth must be positive, got 0"),
        ("synthetic", {"samples": "-1"}, "samples must be positive, got -1"),
        ("digits", {"channels": "0"}, "channels must be positive, got 0"),
        ("digits", {"blocks": "0"}, "blocks must be positive, got 0"),
    ],
)
def test_invalid_sizes_and_options_are_refused(name: str, options: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(InvalidValue, match="^" + re.escape(sentence)):
        load_task(name, options=options)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_folder_for_a_task_with_its_own_data_is_refused(name: str) -> None:
    with refused(InvalidValue):
        load_task(name, Path("d"))
