"""Trainers of Ultralytics, and of nodes, that are watched or in which something happens: for the tests' trainings."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from evener.oracle.apportion import NodeCost
from evener.records.errors import NodeLost

KEPT = 500
"""Numbers of every weight, in a training that keeps its steps."""


class Fault(msgspec.Struct, frozen=True):
    """What happens to a node, once.

    Attributes:
        node: its name.
        batch: of the training, from 1.
        where: killed before the batch is computed, before the optimiser's step, or in the validation that follows it;
            or `torn`: `node` has the sums of gradients, and takes them for lost with `victim`, which is killed.
        victim: see there.
    """

    node: str
    batch: int
    where: Literal["forward", "update", "validate", "torn"]
    victim: str = ""


def struck(base: Any, faults: Sequence[Fault], folder: Path) -> Any:
    """The trainer `base` of nodes, to which `faults` happen; what has happened is kept in `folder`."""

    class Struck(base):  # type: ignore[misc]
        def _setup_train(self) -> None:
            (folder / f"{self.trainer_rank.env.node.name}.pid").write_text(str(os.getpid()))
            super()._setup_train()
            if (gradients := self.model.gradients) is not None:
                finish = gradients.finish
                gradients.finish = lambda number: self._torn(finish, number)

        def _comes(self, where: str) -> bool:
            node, part = self.trainer_rank.env.node.name, self.train_loader.part
            for index, fault in enumerate(faults):
                mark = folder / f"fault{index}"
                here = part is not None and (fault.node, fault.batch, fault.where) == (node, part.step, where)
                if here and not mark.exists():
                    mark.touch()
                    self.victim = fault.victim
                    return True
            return False

        def _die(self, where: str) -> None:
            if self._comes(where):
                os.kill(os.getpid(), signal.SIGKILL)

        def _torn(self, finish: Any, number: int) -> None:
            last = self.model.gradients.last
            finish(number)
            if self._comes("torn"):
                self.model.gradients.last = last
                os.kill(int((folder / f"{self.victim}.pid").read_text()), signal.SIGKILL)
                raise NodeLost("as it seems")

        def preprocess_batch(self, batch: Any) -> Any:
            self._die("forward")
            return super().preprocess_batch(batch)

        def optimizer_step(self) -> None:
            self._die("update")
            super().optimizer_step()

        def _validated(self) -> Any:
            self._die("validate")
            return super()._validated()

    return Struck


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
            self.trainer_rank.work.division.change(3, [NodeCost(unit_seconds=one) for one in seconds])

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


def take_device(device: torch.device) -> None:
    """Let Ultralytics take a device of a kind that it does not know."""
    from ultralytics.engine import trainer, validator

    trainer.parse_device = str
    trainer.select_device = validator.select_device = lambda *_, **__: device
    trainer.get_torch_device_backend = torch.get_device_module


def waiting(base: Any, waits: list[int]) -> Any:
    """The trainer `base`, which keeps how often the host has waited for devices so far, at the end of every batch."""
    from support import standin

    class Waiting(base):  # type: ignore[misc]
        def run_callbacks(self, event: str) -> None:
            super().run_callbacks(event)
            if event == "on_train_batch_end":
                waits.append(standin.load().waits_of_thread())

    return Waiting


def exact(base: Any, fitness: float, rank: int) -> Any:
    """The trainer `base` in float64, from the weights that it draws in float32 and with this `fitness`.

    The fitness is that of every epoch on the leader; other ranks would do better each time.

    Losses of key points call `float()`: the mean of `kobj_loss` is of single precision then, and differs by 1e-7 where
    each rank rounds its own. In this process `float()` gives float64.
    """
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]

    class Exact(base):  # type: ignore[misc]
        def get_model(self, *args: Any, **words: Any) -> Any:
            torch.set_default_dtype(torch.float32)
            try:
                return super().get_model(*args, **words).double()
            finally:
                torch.set_default_dtype(torch.float64)

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
