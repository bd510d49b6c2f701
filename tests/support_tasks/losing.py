"""`tiny`, whose first accelerator disappears or hangs once, five steps after a file is there; a file is removed."""

import dataclasses
import os
from itertools import count
from pathlib import Path

import tiny
import torch

from evener import Task
from support import standin

WHERE = torch.device(standin.NAME, 0)


def task(samples: int = 50, schedule: bool = False, pause: float = 0.0, norm: bool = True) -> Task:
    """A task like `tiny`."""
    made = tiny.task(samples=samples, schedule=schedule, pause=pause, norm=norm)
    file, steps = Path(os.environ["EVENER_TEST_LOSS"]), count()

    begun = Path(os.environ.get("EVENER_TEST_BEGUN") or file.parent / "struck" / "checkpoints")

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_step = outputs.requires_grad and outputs.device == WHERE
        if is_step and begun.exists() and next(steps) == 4:
            try:
                file.unlink()
            except FileNotFoundError:  # a process that has begun again on this node
                pass
            else:
                controls = standin.load()
                (controls.hang if os.environ.get("EVENER_TEST_HANGS") else controls.lose)(0, True)
        value: torch.Tensor = made.loss(outputs, targets)
        return value

    return dataclasses.replace(made, loss=loss)
