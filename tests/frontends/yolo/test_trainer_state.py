"""The state of a trainer of Ultralytics, which ranks that come later, checkpoints and trials take over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from evener.frontends.yolo.generations import encode_state, restore_state
from evener.records.history import History


def trainer(*, is_scaled: bool) -> Any:
    """A trainer as far as its state goes, before its first step."""
    torch.manual_seed(0)
    module: Any = nn.Linear(3, 2)
    module.criterion = SimpleNamespace(updates=0)
    gradients = SimpleNamespace(last=-1, summed=[])
    model = SimpleNamespace(module=module, gradients=gradients, told=(torch.zeros(1), {"box_loss": torch.ones(())}))
    return SimpleNamespace(
        model=model,
        ema=SimpleNamespace(ema=nn.Linear(3, 2), updates=0),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        scaler=torch.amp.GradScaler("cpu", enabled=is_scaled, init_scale=8.0, growth_interval=2),
        epoch=0,
        best_fitness=None,
        stopper=SimpleNamespace(best_epoch=0),
        nan_recovery_attempts=0,
        metrics={},
        fitness=None,
        tloss=None,
    )


def step(one: Any) -> None:
    """A step with an even loss, as Ultralytics makes it."""
    one.optimizer.zero_grad()
    one.scaler.scale(one.model.module(torch.ones(1, 3)).sum()).backward()
    one.scaler.step(one.optimizer)
    one.scaler.update()


def test_state_contains_weights_optimizer_and_scaler() -> None:
    for is_scaled in (True, False):
        first, second = trainer(is_scaled=is_scaled), trainer(is_scaled=is_scaled)
        for _ in range(3):
            step(first)
        head = restore_state(second, encode_state(first, 3, 0, History()))
        assert head.batch == 3
        assert second.scaler.state_dict() == first.scaler.state_dict()
        assert second.scaler.get_scale() == (16.0 if is_scaled else 1.0)
        for one in (first, second):
            step(one)
        assert torch.equal(first.model.module.weight, second.model.module.weight)


def test_gradients_that_wait_for_a_step_do_not_depend_on_the_scale() -> None:
    first, second = trainer(is_scaled=True), trainer(is_scaled=False)
    first.scaler.scale(first.model.module(torch.ones(1, 3)).sum()).backward()
    first.model.gradients.summed = [weight.grad for weight in first.model.module.parameters()]
    first.optimizer.param_groups[0]["momentum"] = 0.5
    restore_state(second, encode_state(first, 1, 0, History()))
    assert [grad.tolist() for grad in second.model.gradients.summed] == [[[1.0] * 3] * 2, [1.0] * 2]
    assert second.optimizer.param_groups[0]["momentum"] == 0.5
