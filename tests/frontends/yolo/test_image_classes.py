"""Classes of images, by which shares of a detection set are made alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from evener.data.shares import class_balanced_shares
from evener.frontends.yolo.image_shares import image_classes


def detection(*objects: list[int]) -> Any:
    return SimpleNamespace(labels=[{"cls": np.array(own, np.float32).reshape(-1, 1)} for own in objects])


def test_rarest_object_decides_the_class_of_an_image() -> None:
    found = image_classes(detection([0, 0, 1], [0], [], [2, 0, 1], [1, 0]))
    assert found.tolist() == [1, 0, -1, 2, 1]


def test_a_set_without_objects_has_one_class() -> None:
    assert image_classes(detection([], [])).tolist() == [-1, -1]


def test_classifier_image_has_its_own_class() -> None:
    dataset = SimpleNamespace(samples=[("a.png", 3, None), ("b.png", 0, None)])
    assert image_classes(dataset).tolist() == [3, 0]


def test_uneven_shares_hold_rare_objects_in_proportion() -> None:
    generator = np.random.default_rng(0)
    objects = [[0] * 5 + [1] * bool(generator.integers(4) == 0) + [2] * (k % 10 == 0) for k in range(200)]
    classes = image_classes(detection(*objects))
    shares = class_balanced_shares(classes, [3, 1], seed=0)
    rare = [sum(2 in objects[image] for image in share.tolist()) for share in shares]
    assert rare == [15, 5]
