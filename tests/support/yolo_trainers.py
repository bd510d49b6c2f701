"""Trainers of Ultralytics, and of nodes, that are watched or in which something happens: for the tests' trainings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from evener.oracle.apportion import Worker

KEPT = 500
"""Numbers of every weight, in a training that keeps its steps."""


def spoiled(base: Any, epoch: int) -> type:
    """The trainer `base`, whose first batch of `epoch` is no numbers, the first time that it comes."""
    left = [epoch]

    def preprocess_batch(self: Any, batch: Any) -> Any:
        batch = base.preprocess_batch(self, batch)
        if left == [self.epoch]:
            left.clear()
            batch["img"] = batch["img"] * torch.nan
        return batch

    return type(f"Spoiled{base.__name__}", (base,), {"preprocess_batch": preprocess_batch})


def clocked(base: Any, save_seconds: float, spans: list[float]) -> Any:
    """The trainer `base`, which notes how long the batches of every epoch took, and is slow to save."""

    class Clocked(base):  # type: ignore[misc]
        def run_callbacks(self, event: str) -> None:
            if event == "on_train_epoch_start":
                self.begun = time.perf_counter()
            super().run_callbacks(event)
            if event == "on_train_epoch_end":
                spans.append(time.perf_counter() - self.begun)

        def save_model(self) -> Any:
            time.sleep(save_seconds)
            return super().save_model()

    return Clocked


def redivided(base: Any, seconds: Sequence[float]) -> Any:
    """The trainer `base`, whose batches are divided by so many seconds of an image from the third one on."""

    class Redivided(base):  # type: ignore[misc]
        def _setup_train(self) -> None:
            super()._setup_train()
            self.seat.division.change(3, [Worker(unit_seconds=one) for one in seconds])

    return Redivided


def watched(base: Any, steps: list[torch.Tensor]) -> Any:
    """The trainer `base`, of which `steps` are given up to so many numbers of every weight after every batch."""

    class Watched(base):  # type: ignore[misc]
        def run_callbacks(self, event: str) -> None:
            super().run_callbacks(event)
            if event == "on_train_batch_end":
                weights = [weight.detach().flatten() for weight in self.model.parameters()]
                rows = [torch.cat((w, w.new_zeros(KEPT)))[:: max(1, len(w) // KEPT)][:KEPT] for w in weights]
                steps.append(torch.stack(rows))

    return Watched


def exact(base: Any, fitness: float, rank: int) -> Any:
    """The trainer `base` in float64, with the same `fitness` of every epoch on the leader.

    Losses of key points call `float()`: the mean of `kobj_loss` is of single precision then, and differs by 1e-7 where
    each rank rounds its own. In this process `float()` gives float64.
    """
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]

    class Exact(base):  # type: ignore[misc]
        def preprocess_batch(self, batch: Any) -> Any:
            batch = super().preprocess_batch(batch)
            return {
                name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for name, value in batch.items()
            }

        def validate(self) -> Any:
            own, best = fitness + rank * self.epoch, vars(self)["best_fitness"]
            self.best_fitness = own if best is None else max(own, best)
            return {}, own

        def final_eval(self) -> None:
            pass

    return Exact
