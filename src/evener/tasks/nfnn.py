"""Task `nfnn`: the published experiment of NfNN (A10), a small perceptron on MNIST; see its thin twin."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.optim import SGD
from torch.utils.data import TensorDataset

from evener.task import Task
from evener.tasks.mnist import Normalise
from evener.tasks.thin.nfnn import BATCH, CLASSES, FOLDER, HIDDEN, LEARNING_RATE, PIXELS, WHITE, read_part


def task(data_dir: Path | None = None) -> Task:
    """784-32-10 with ReLU and log-softmax, weights from -1 to 1, SGD with rate 0.01 on batches of 32.

    Args:
        data_dir: folder of MNIST's four files; data/mnist by default.

    Raises:
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: likewise, a file is damaged.
    """
    folder = data_dir or FOLDER
    return Task(
        name="nfnn",
        model=nfnn_model,
        loss=nll_loss,
        train_data=partial(_data, folder, 0),
        validation_data=partial(_data, folder, 1),
        optimizer=partial(SGD, lr=LEARNING_RATE),
        batch_size=BATCH,
        epochs=4,
    )


def nfnn_model() -> nn.Module:
    """Bytes [N, 784] -> log-probabilities [N, 10]."""
    model = nn.Sequential(
        Normalise(mean=0, std=WHITE),
        nn.Linear(PIXELS, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
        nn.LogSoftmax(1),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return model


def _data(folder: Path, part: int) -> TensorDataset:
    images, labels = read_part(folder, part)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
