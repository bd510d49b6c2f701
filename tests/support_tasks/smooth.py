"""A task without BatchNorm, so that how the samples are divided changes nothing; it imports a module beside it."""

import torch
from smooth_parts import data, net
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from evener import Task

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
}


def task(optimizer: str = "sgd", samples: int = 50, epochs: int = 3, clip_norm: float | None = None) -> Task:
    return Task(
        name="smooth",
        model=net,
        loss=nn.functional.cross_entropy,
        train_data=lambda: data(samples, 1),
        validation_data=lambda: data(23, 2),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=lambda made, steps: CosineAnnealingLR(made, steps),
        batch_size=10,
        epochs=epochs,
        clip_norm=clip_norm,
    )
