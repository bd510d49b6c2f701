"""Dropout of a divided model drops what one process drops, with the same random numbers on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.group import Group, join_group, leave_group
from evener.errors import EvenerError
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.divided import ShardedModel
from evener.parallel.process_mesh import form_process_mesh


class Dropping(nn.Module):
    """Dropout as a module and as a function, of images and of features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 7, 3, padding=1), nn.Conv2d(7, 5, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.enter(x)), 0.5, self.training)
        x = self.drop(self.leave(x)).mean((2, 3))
        return self.drop(self.head(x))  # type: ignore[no-any-return]


def start(program: Any, ranks: int) -> None:
    run_local(program, [LocalNode(name=f"n{i}", threads=1) for i in range(ranks)], None, patience=30, on_event=print)


def joined(env: RankEnvironment) -> Group:
    return join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=30)


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Dropping().double(), torch.randn(5, 3, 6, 7).double()


def hold(env: RankEnvironment, _order: None) -> None:
    """One rank: outputs and gradients under every arrangement are those of one process with the same seed."""
    group = joined(env)
    for arrangement, samples in (
        (Arrangement(division="sharded", replicas=(Replica(shares=(2, 1, 1)),)), [5]),
        (Arrangement(division="spatial", replicas=(Replica(shares=(1, 3, 1)),)), [5]),
        (Arrangement(division="filter", replicas=(Replica(shares=(1, 2)), Replica(shares=(1,)))), [3, 2]),
    ):
        model, x = made()
        torch.manual_seed(7)
        expected = model(x)
        torch.autograd.backward(expected.square().mean(1).mean())
        assert 0.1 < float((expected == 0).double().mean()) < 0.6
        place = form_process_mesh(group, arrangement)
        start = sum(samples[: place.index])
        own = x[start : start + samples[place.index]]
        part = ShardedModel(made()[0], place, [own])
        torch.manual_seed(7)
        found = part(own)
        assert torch.allclose(found, expected[start : start + len(own)], atol=1e-12), arrangement
        torch.autograd.backward(found.square().mean(1).mean() * part.share)
        for name, weight in part.part.named_parameters():
            if part.shards[name].layout.state != "split":
                grad = model.get_parameter(name).grad
                assert grad is not None
                assert weight.grad is not None
                assert torch.allclose(weight.grad, grad, atol=1e-12), (arrangement, name)
        part.eval()
        model.eval()
        assert torch.allclose(part(own), model(own), atol=1e-12)
    group.barrier()
    leave_group()


def test_masks_are_those_of_one_process() -> None:
    start(hold, 3)


def disagree(env: RankEnvironment, _order: None) -> None:
    """One of two ranks, with a random generator in a state of its own."""
    group = joined(env)
    model, x = made()
    place = form_process_mesh(group, Arrangement(division="sharded", replicas=(Replica(shares=(1, 1)),)))
    part = ShardedModel(model, place, [x])
    torch.manual_seed(env.rank)
    part(x)


def test_ranks_with_other_random_numbers_are_told() -> None:
    with pytest.raises(EvenerError, match=r"random generators in different states; call torch\.manual_seed alike"):
        start(disagree, 2)
