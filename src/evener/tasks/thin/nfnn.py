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
from evener.tasks.thin.mnist import ThinNormalise

FOLDER = Path("data/mnist")
PIXELS, HIDDEN, CLASSES = 784, 32, 10
WHITE = 255
TRAINING_SHARE = 0.8
LEARNING_RATE = 0.01
BATCH = 32


def thin_task(data_dir: Path | None = None) -> ThinTask:
    """784-32-10 with ReLU and log-softmax, weights from -1 to 1, SGD with rate 0.01 on batches of 32.

    The first four fifths of MNIST's training images are trained on, the others validated with: 48 000 and 12 000.

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
        train_data=partial(read_part, folder, 0),
        validation_data=partial(read_part, folder, 1),
        optimizer=partial(optim.SGD, lr=LEARNING_RATE),
        batch_size=BATCH,
        epochs=4,
    )


def nfnn_model() -> nn.Module:
    """Bytes [N, 784] -> log-probabilities [N, 10]."""
    model = nn.Sequential(
        ThinNormalise(mean=0, std=WHITE),
        nn.Linear(PIXELS, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
        nn.LogSoftmax(1),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return model


def read_part(folder: Path, part: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training (0) or validation samples (1): images as bytes [N, 784], and their labels [N]."""
    images, labels = read_mnist(folder, "train")
    cut = int(TRAINING_SHARE * len(images))
    chosen = slice(cut) if part == 0 else slice(cut, None)
    return images[chosen].reshape(-1, PIXELS).copy(), labels[chosen].astype(np.int64)  # a view would keep all of them
