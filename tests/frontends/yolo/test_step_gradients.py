"""When a step of Ultralytics' loop is foreseen: as often as the loop makes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.yolo.step_gradients import StepGradients, cadence

BATCHES = 7
"""Of an epoch."""


def gradients_of(
    accumulate: int, warm_up: int, model: nn.Module | None = None, *, is_elastic: bool = False
) -> StepGradients:
    device = torch.device("cpu")
    group = Group(rank=0, size=1, device=device, nodes=["n0"], timer=StepTimer(device), is_elastic=is_elastic)
    trainer: Any = SimpleNamespace(
        accumulate=accumulate, train_loader=range(BATCHES), _get_warmup_iterations=lambda batches: warm_up
    )
    return StepGradients(model or nn.Linear(2, 1), group, trainer)


def steps_of_the_loop(gradients: StepGradients, numbers: range, accumulate: int, warm_up: int) -> list[int]:
    """Batches after which there is a step, by the loop's own rule; every one has to be foreseen, and no other."""
    last, now, found = -1, accumulate, list[int]()
    for number in numbers:
        gradients.begin(number)
        if warm_up and number <= warm_up:
            now = max(1, int(np.interp(number, [0, warm_up], [1, accumulate]).round()))
        assert gradients.is_due == (number - last >= now)
        if gradients.is_due:
            gradients.finish(number)
            last = number
            found.append(number)
    return found


@pytest.mark.parametrize(("accumulate", "warm_up"), [(1, 0), (4, 0), (4, 15), (3, 5)])
def test_every_step_of_the_loop_is_predicted(accumulate: int, warm_up: int) -> None:
    gradients = gradients_of(accumulate, warm_up)
    found = steps_of_the_loop(gradients, range(5 * BATCHES), accumulate, warm_up)
    assert set(np.diff(found[len(found) // 2 :])) == {accumulate}


def test_resumed_training_steps_after_its_first_batch() -> None:
    assert steps_of_the_loop(gradients_of(4, 5), range(3 * BATCHES, 5 * BATCHES), 4, 5)[:2] == [21, 25]


def test_repeated_epoch_steps_after_its_first_batch() -> None:
    gradients = gradients_of(4, 0)
    steps_of_the_loop(gradients, range(2 * BATCHES), 4, 0)
    gradients.restart()
    assert steps_of_the_loop(gradients, range(BATCHES, 2 * BATCHES), 4, 0)[0] == BATCHES


def test_gradients_accumulate_over_batches_without_a_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    gradients = gradients_of(2, 0, model)
    for number in (0, 1):
        gradients.begin(number)
        model(torch.ones(1, 2)).sum().backward()
        if number == 1:
            gradients.finish(number)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


def test_gradients_reduced_at_epoch_end_are_not_reduced_again() -> None:
    model = nn.Linear(2, 1, bias=False)
    gradients = gradients_of(BATCHES + 2, 0, model, is_elastic=True)
    completed = []
    for number in range(BATCHES + 2):
        if gradients.begin(number):
            completed.append(number)
        model(torch.ones(1, 2)).sum().backward()
        if number in completed:
            gradients.finish(number)
        if number == BATCHES - 1:
            assert model.weight.grad is None
        if number == BATCHES:  # a rank is lost: this batch is done again, and those of the epoch before are not
            gradients.forget()
            gradients.begin(number)
            model(torch.ones(1, 2)).sum().backward()
    assert completed == [BATCHES - 1, BATCHES + 1]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[BATCHES + 2.0] * 2]


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize(("accumulate", "warm_up"), [(1, 0), (4, 0), (4, 15), (3, 5), (16, 100)])
def test_update_interval_follows_the_batches_of_the_whole_training(
    accumulate: int, warm_up: int, is_elastic: bool
) -> None:
    trainer: Any = SimpleNamespace(
        accumulate=accumulate, train_loader=range(BATCHES), epochs=5, _get_warmup_iterations=lambda batches: warm_up
    )
    gradients = gradients_of(accumulate, warm_up, is_elastic=is_elastic)
    total = 5 * BATCHES
    updates = exchanges = 0
    for number in range(total):
        exchanges += gradients.begin(number)
        updates += gradients.is_due
        gradients.last = number if gradients.is_due else gradients.last
    assert cadence(trainer, is_elastic=is_elastic) == pytest.approx((total / updates, total / exchanges))
