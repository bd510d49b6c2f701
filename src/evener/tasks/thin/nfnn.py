"""Thin task `nfnn`: the published experiment of NfNN (A10), a small perceptron on MNIST."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.data.mnist import read_mnist
from evener.task import ThinTask

FOLDER = Path("data/mnist")
PIXELS, HIDDEN, CLASSES = 784, 32, 10
WHITE = 255
NUM_TRAIN = 48_000
LEARNING_RATE = 0.01
BATCH = 32


def thin_task(data_dir: Path | None = None) -> ThinTask:
    """784-32-10 with ReLU and log-softmax, weights from -1 to 1, SGD with rate 0.01 on batches of 32.

    The first 48 000 of MNIST's 60 000 training images are trained on, the other 12 000 validated with.

    Args:
        data_dir: folder of MNIST's four files; data/mnist by default.

    Raises:
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: likewise, a file is damaged.
    """
    folder = data_dir or FOLDER
    return ThinTask(
        name="nfnn",
        model=nfnn_model,
        loss=F.nll_loss,
        train_data=partial(read_part, folder, slice(NUM_TRAIN)),
        validation_data=partial(read_part, folder, slice(NUM_TRAIN, None)),
        optimizer=partial(optim.SGD, lr=LEARNING_RATE),
        batch_size=BATCH,
        epochs=4,
    )


def nfnn_model() -> nn.Module:
    """[N, 784] -> log-probabilities [N, 10]."""
    model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES), nn.LogSoftmax(1))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return model


def read_part(folder: Path, part: slice) -> tuple[NDArray[Any], NDArray[Any]]:
    """Some training images as float32 [N, 784] from 0 to 1, and their labels [N]."""
    images, labels = read_mnist(folder, "train")
    chosen = images[part].reshape(-1, PIXELS)
    return np.divide(chosen, WHITE, dtype=np.float32), labels[part].astype(np.int64)
