"""What a task's PyTorch optimiser and schedule would do in each step of a run: for the server, and for local steps."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evener.errors import InvalidInput
from evener.sync import agreement
from evener.sync.agreement import Outer, Rate
from evener.task import Task

Settings = dict[str, Any]
"""Of one group of parameters in one step: `lr`, `momentum`, `betas`, as far as the optimiser has them."""

_SCHEDULED = ("lr", "momentum", "betas")


def optimizer_of(task: Task, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The task's optimiser, or the one that tasks without have."""
    return task.optimizer(parameters) if task.optimizer else SGD(parameters, lr=0.1, momentum=0.9)


def schedule_of(task: Task, model: nn.Module, num_steps: int) -> list[list[Settings]]:
    """The settings of every group in every step of a run of `num_steps`; one step's if they never change.

    Raises:
        InvalidInput: the schedule follows something that is not known beforehand.
    """
    optimizer = optimizer_of(task, model.parameters())
    if task.scheduler is None:
        return [_settings(optimizer)]
    scheduler, steps = task.scheduler(optimizer, num_steps), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimiser makes no steps is what is meant here
        for _ in range(num_steps):
            steps.append(_settings(optimizer))
            try:
                scheduler.step()
            except TypeError as error:
                name = type(scheduler).__name__
                raise InvalidInput(
                    f"a schedule has to be known before the run on the star plane: {name} is not"
                ) from error
    return steps


def settings_at(schedule: list[list[Settings]], step: int) -> list[Settings]:
    """The settings in `step`, from 0; the last ones hold for all later steps."""
    return schedule[min(step, len(schedule) - 1)]


def apply(optimizer: Optimizer, settings: list[Settings]) -> None:
    """Have the optimiser make its next step with `settings`."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def outer_of(task: Task, model: nn.Module, num_steps: int) -> Outer:
    """The server's optimiser that does what the task's would.

    Raises:
        InvalidInput: the server has none like it.
    """
    optimizer, schedule = optimizer_of(task, model.parameters()), schedule_of(task, model, num_steps)
    group = _only_group(optimizer)
    rates, kept = [step[0]["lr"] for step in schedule], {name: group[name] for name in _SCHEDULED[1:] if name in group}
    for step in schedule:
        changed = [name for name, value in kept.items() if step[0][name] != value]
        _refuse_if(bool(changed), f"a schedule that changes {' and '.join(changed)}")
    _refuse_if(group.get("maximize", False), "maximize")
    if type(optimizer) is SGD:
        _refuse_if(group["dampening"] != 0, "dampening")
        return agreement.Sgd(
            learning_rate=_rate(rates),
            momentum=float(group["momentum"]),
            is_nesterov=bool(group["nesterov"]),
            weight_decay=float(group["weight_decay"]),
        )
    _refuse_if(type(optimizer) not in (Adam, AdamW), f"the optimiser {type(optimizer).__name__}")
    _refuse_if(group["amsgrad"], "amsgrad")
    return agreement.Adam(
        learning_rate=_rate(rates),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        is_decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
    )


def _settings(optimizer: Optimizer) -> list[Settings]:
    return [
        {name: _number(group[name]) for name in _SCHEDULED if name in group} for group in optimizer.param_groups
    ]  # fmt: skip


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _only_group(optimizer: Optimizer) -> Settings:
    """What all groups of parameters have in common: everything but their parameters."""
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    ]
    _refuse_if(any(group != groups[0] for group in groups), "groups of parameters with settings of their own")
    return groups[0]


def _refuse_if(condition: bool, what: str) -> None:
    if condition:
        raise InvalidInput(
            f"the server does as SGD, Adam and AdamW do, and does not know {what}; "
            "with --agreement average or diloco every node uses the task's own optimiser"
        )


def _rate(rates: list[float]) -> Rate:
    """One number if it never changes; a rate of 0 becomes the smallest there is, for a server's has to be positive."""
    positive = tuple(max(float(rate), sys.float_info.min) for rate in rates)
    return positive[0] if len(set(positive)) == 1 else positive
