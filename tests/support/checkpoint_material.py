"""A model some steps on, to be written into checkpoints and read again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.comm.joining import join_group
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import Criterion
from evener.parallel.replicated import ReplicatedModel
from evener.training.checkpoint import Checkpoint, Checkpoints, CheckpointState


def state(step: int) -> CheckpointState:
    return CheckpointState(task="t", step=step, seed=1, batch_size=4, accumulate=1, samples=9, precision="fp32")


_OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Material:
    """A model, an optimiser and a schedule, some steps on."""

    def __init__(self, steps: int, optimizer: str = "Adam") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model[2].bias = self.model[2].bias
        self.optimizer = _OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(steps):
            self.step()

    @property
    def joint(self) -> ReplicatedModel:
        alone = join_group(rank=0, nodes=["n0"], device=torch.device("cpu"), store=None, patience=1)
        return ReplicatedModel(self.model, alone, Criterion(loss=nn.MSELoss(), autocast=nullcontext, scale=abs))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(12.0).view(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def save(self, folder: Path, step: int) -> Path:
        weights, optimizer = self.joint.gather_weights(), self.optimizer.state_dict()
        made = Checkpoint.of(state(step), weights, optimizer, self.scheduler, self.scaler)
        return Checkpoints(folder).write(made)

    def load(self, folder: Path) -> int:
        checkpoints = Checkpoints(folder)
        path, found = checkpoints.latest()
        optimizer = ModelOptimizer(lambda _: self.optimizer, self.joint.held())
        checkpoints.load(path, found, self.joint, optimizer, self.scheduler, self.scaler)
        return found.step
