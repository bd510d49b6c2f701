"""All that one rank's training loop works with, ready to go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.data.sampler import Division, Sampler
from evener.oracle.apportion import Balance
from evener.parallel.parallel_model import ParallelModel
from evener.plan import Plan
from evener.run.precision import Arithmetic
from evener.run.settings import Settings
from evener.task import Task

Emit = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that one rank's loop works with, ready to go.

    Attributes:
        task: what the user wrote.
        settings: of the run.
        plan: who does what.
        model: this rank's part in it.
        optimizer: of its parameters.
        scheduler: of the learning rate, or None.
        arithmetic: precision.
        train_data: map-style.
        validation_data: map-style, or None.
        sampler: the samples of this rank's replica, by step.
        division: of samples among replicas; None if shares are fixed by where the data is.
        balance: what re-balancing starts from; None to leave shares alone.
        emit: told of steps, validations and events; called on the leader only.
        before_step: called with the step's number before each.
        stop_requested: whether this process was asked to stop.
    """

    task: Task
    settings: Settings
    plan: Plan
    model: ParallelModel
    optimizer: Optimizer
    scheduler: LRScheduler | None
    arithmetic: Arithmetic
    train_data: Dataset[Any]
    validation_data: Dataset[Any] | None
    sampler: Sampler
    division: Division | None
    balance: Balance | None
    emit: Emit
    before_step: Callable[[int], None] = lambda _step: None
    stop_requested: Callable[[], bool] = lambda: False

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        return self.model.group
