"""Task `nfnn`: the published experiment of NfNN (A10), a small perceptron on MNIST."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.functional import nll_loss
from torch.optim import SGD

from evener.data.tasks import thin
from evener.data.tasks.parts import Normalise, twin
from evener.records.task import Task


def task(data_dir: Path | None = None, lr: float = thin.NFNN_RATE, hidden: int = thin.HIDDEN) -> Task:
    """784-32-10 with ReLU and log-softmax, weights from -1 to 1, SGD with rate 0.01 on batches of 32.

    Args:
        data_dir: folder of MNIST's four files; data/mnist by default.
        lr: learning rate.
        hidden: units between the two layers.

    Raises:
        InvalidValue: `lr` or `hidden` is not positive.
        MissingFile: (when the data are first used) a file is not there; says which to fetch from where.
        InvalidFile: (when the data are first used) a file is damaged.
    """
    thin_task = thin.nfnn(data_dir, lr, hidden)
    return twin(thin_task, model=partial(_model, hidden), loss=nll_loss, optimizer=partial(SGD, lr=lr))


def _model(hidden: int) -> nn.Module:
    """Bytes [N, 784] -> log-probabilities [N, 10]."""
    model = nn.Sequential(
        Normalise(mean=0, std=thin.WHITE),
        nn.Linear(thin.PIXELS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, thin.CLASSES),
        nn.LogSoftmax(1),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return model
