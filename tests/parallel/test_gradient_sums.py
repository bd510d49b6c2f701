"""Sums that were switched off for a while are on again, however that ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from support.thread_ranks import together

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())


def test_error_restores_gradient_sums_and_sample_counting() -> None:
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def work(group: Group) -> torch.Tensor:
        mesh = form_process_mesh(group, Arrangement(division="spatial", replicas=(Replica(shares=(1, 1)),)))
        model = ShardedModule(MODEL, mesh, [x])
        for switched_off in (model.sums.accumulating(), model.without_samples()):
            with pytest.raises(OSError, match="interrupted"), switched_off:
                raise OSError("interrupted")
        torch.autograd.backward(model(x).mean() * model.share)
        weight = dict(model.part.named_parameters())["0.weight"]
        assert weight.grad is not None
        return weight.grad

    torch.autograd.backward(MODEL(x).mean())
    expected = MODEL.get_parameter("0.weight").grad
    for found in together(2, work):
        torch.testing.assert_close(found, expected)
