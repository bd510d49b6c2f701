"""A class for every image, so that shares of a data set can be alike: of a detection set, that of its rarest object."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NO_OBJECT = -1


def image_classes(dataset: Any) -> NDArray[np.int64]:
    """The class of every image of a data set of Ultralytics, [N]; -1 without an object.

    An image has many objects of some classes; common ones are in every share anyhow, so the rarest of its classes, by
    images that have it, decides.
    """
    if not hasattr(dataset, "labels"):
        return np.array([sample[1] for sample in dataset.samples], np.int64)
    found = [np.unique(label["cls"]).astype(np.int64) for label in dataset.labels]
    classes, counts = np.unique(np.concatenate([*found, np.empty(0, np.int64)]), return_counts=True)
    images = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    rarest = [min(own.tolist(), key=lambda one: (images[one], one), default=_NO_OBJECT) for own in found]
    return np.array(rarest, np.int64)
