"""Stages compute in the precision that the step's thread asks for, and what travels between them keeps its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evener.parallel.pipeline.pipeline import Pipeline
from support.pipeline_cases import CASES, cost

CPU = torch.device("cpu")


def stepped(name: str, stages: int, precision: torch.dtype | None, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step of a model in single precision, under autocast if `precision` says so."""
    case = CASES[name]
    torch.manual_seed(0)
    x = case.inputs(6)
    x = tuple(part.float() if part.is_floating_point() else part for part in x) if isinstance(x, tuple) else x.float()
    y = case.targets(6)
    model = case.model().float()
    pipeline = Pipeline(
        model, x, case.loss, weigh=case.weigh, costs=cost, micro_batches=2, on=[CPU] * stages, **options
    )
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss = pipeline.step(x, y)
    return loss.detach(), {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["plain", "unet", "transformer"])
@pytest.mark.parametrize("policy", ["never", "always"])
def test_autocast_computes_the_same_for_any_number_of_stages(name: str, policy: str) -> None:
    options: dict[str, Any] = {"rematerialise": policy, "schedule": "gpipe"}
    loss, gradients = stepped(name, 1, torch.bfloat16, **options)
    exact, _ = stepped(name, 1, None, **options)
    assert loss != exact, "autocast makes a difference"
    for stages in (2, 3):
        found, own = stepped(name, stages, torch.bfloat16, **options)
        assert torch.equal(found, loss)
        assert own.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert own[parameter].dtype == torch.float32
            error = float((own[parameter] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3))
            assert error < 0.02, parameter  # where gradients of one value meet, bf16 rounds in another order
