"""Only modules that are what the table says are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from evener.parallel.op_registry import BatchNorm, of_module, without_synchronised

IMAGES = (2, 3, 6, 6)


class OfDefaults(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 4, 1)


class Own(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.as_tensor(super()._conv_forward(x, weight - weight.mean(), bias))


def _hooked(register: str) -> nn.Module:
    layer: Any = nn.Conv2d(3, 4, 1)
    getattr(layer, register)(lambda *given: None)
    made: nn.Module = layer
    return made


def _patched() -> nn.Module:
    layer: Any = nn.Conv2d(3, 4, 1)
    layer.forward = lambda x: x[:, :1].expand(-1, 4, -1, -1)
    made: nn.Module = layer
    return made


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Conv2d(3, 4, 1), "convolution"),
        (OfDefaults(), "convolution"),
        (_hooked("register_forward_hook"), "convolution"),
        (_hooked("register_forward_pre_hook"), "convolution"),
        (Own(3, 4, 1), "other"),
        (parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), "other"),
        (_patched(), "other"),
        (_hooked("register_full_backward_hook"), "whole"),
        (_hooked("register_full_backward_pre_hook"), "whole"),
    ],
)
def test_only_plain_modules_are_divided(module: nn.Module, kind: str) -> None:
    found = of_module(module, [IMAGES], (2, 4, 6, 6))
    assert found["kind"] == kind
    assert {weight.role for weight in found["weights"]} == ({"kernel", "vector"} if kind == "convolution" else {"free"})


def test_sync_batch_norm_is_treated_as_batch_norm() -> None:
    norm: Any = nn.SyncBatchNorm
    model = without_synchronised(norm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())))
    assert type(model[0]) is BatchNorm  # type: ignore[index]
    assert of_module(model[0], [IMAGES], IMAGES)["kind"] == "batch_norm"  # type: ignore[index]
