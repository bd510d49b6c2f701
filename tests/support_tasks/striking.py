"""`tiny`, whose second accelerator is lost or full from one moment on, once: a file has the moment, and is removed.

step    in the optimizer's step, in the training
loss    in the loss, in the training
check   in the loss of the ranks, in the check before the first step
made    when the optimizer is made for a training
"""

import dataclasses
import os
import traceback
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from evener import Task
from support import standin

WHERE = torch.device(standin.NAME, 1)


def task(samples: int = 50, schedule: bool = False, pause: float = 0.0) -> Task:
    """A task like `tiny`."""
    made = tiny.task(samples=samples, schedule=schedule, pause=pause, norm=False)
    file, calls = Path(os.environ["EVENER_TEST_STRIKE"]), count()

    def strike(moment: str, device: torch.device) -> None:
        if device != WHERE or not file.exists() or file.read_text() != moment:
            return
        if moment == "check" and not is_checked():
            return
        if moment in ("step", "loss") and not ((file.parent / "run" / "checkpoints").exists() and next(calls) == 4):
            return
        file.unlink()
        controls = standin.load()
        controls.lose(1, True) if os.environ["EVENER_TEST_FAULT"] == "lost" else controls.limit_memory(1, 10)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            strike("step", self.param_groups[0]["params"][0].device)
            super().step(closure)

    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        kept = list(parameters)
        strike("made", kept[0].device)
        kept[0].detach().clone()
        return Optimizer(kept, lr=0.1, momentum=0.9)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            strike("loss", outputs.device)
            strike("check", outputs.device)
        value: Tensor = made.loss(outputs, targets)
        return value

    return dataclasses.replace(made, loss=loss, optimizer=optimizer)


def is_checked() -> bool:
    """Return whether the check before the first step computes this rank's part."""
    return any(one.name == "divided" and one.filename.endswith("trial.py") for one in traceback.extract_stack())
