"""A task that `evener train` is given: `--option recipe=kind/name`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from evener.records.task import Task
from evener.tracer.nested import map_tensors
from exact.divisions import BATCH
from exact.recipe import Recipe, recipe_of


class Samples(Dataset[Any]):
    """The samples of one of a recipe's batches."""

    def __init__(self, recipe: Recipe, number: int = 0, count: int = BATCH) -> None:
        self._batch, self._count = recipe.batch(number, count), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return map_tensors(self._batch, lambda tensor: tensor[index])


def task(recipe: str) -> Task:
    found = recipe_of(recipe)
    return Task(
        name="recipe",
        model=found.model,
        loss=found.loss,
        train_data=lambda: Samples(found),
        optimizer=found.optimizer,
        batch_size=BATCH,
        clip_norm=found.clip,
    )
