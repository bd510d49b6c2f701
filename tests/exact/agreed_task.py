"""A recipe as a task that a master's nodes train, and that `evener train` is given: `--option recipe=kind/name`."""

from __future__ import annotations

import numpy as np

from evener.records.task import Task
from exact.recipe import recipe_of
from exact.recipe_task import Samples

TRAINING, VALIDATION, BATCH, EPOCHS = 17, 6, 10, 2
"""Samples, samples of a step, and passes: the second step of an epoch is smaller."""


def task(recipe: str) -> Task:
    found = recipe_of(recipe)
    return Task(
        name=recipe,
        model=found.model,
        loss=found.loss,
        train_data=lambda: Samples(found, 0, TRAINING),
        validation_data=lambda: Samples(found, 1, VALIDATION),
        optimizer=found.optimizer,
        batch_size=BATCH,
        epochs=EPOCHS,
        correct=None,
        labels=lambda: np.zeros(TRAINING, dtype=np.int64),
        clip_norm=found.clip,
    )
