"""A divided model draws what one process draws, for the samples of all replicas, the same on all ranks of one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.group import Group
from evener.comm.joining import join_group, leave_group
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.drawn_ops import refuse_own_draws
from evener.parallel.op_graph import op_graph
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from evener.records.errors import EvenerError, InvalidInput
from support.refusals import refused


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


class Drawing(nn.Module):
    """Draws of many kinds: by shapes, in place, for single channels, and inside of modules that are one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.drop, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Dropout2d(0.4), nn.Linear(6, 4)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.enter(x))
        if self.training:
            y = y * (torch.rand(len(y), 1, 1, 1, dtype=y.dtype) < 0.8) + 0.1 * torch.randn_like(y)
        z = y.flatten(2).permute(2, 0, 1)  # pixels first
        z = self.attend(z, z, z, need_weights=False)[0].mean(0)
        if self.training:
            z = z * torch.empty(len(z), 1, dtype=z.dtype).bernoulli_(0.7) * (self.scale + torch.randn(6).double())
        return self.head(z)  # type: ignore[no-any-return]


def start(program: Any, ranks: int) -> None:
    run_local(program, [NodeSpec(name=f"n{i}", threads=1) for i in range(ranks)], None, patience=30, on_event=print)


def joined(env: RankEnvironment) -> Group:
    return join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=30)


def made(kind: type[nn.Module] = Dropping) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().double(), torch.randn(5, 3, 6, 7).double()


PARTS = (Arrangement(division="sharded", replicas=(Replica(shares=(2, 1, 1)),)), [5])
STRIPS = (Arrangement(division="spatial", replicas=(Replica(shares=(1, 3, 1)),)), [5])
BOTH = (Arrangement(division="filter", replicas=(Replica(shares=(1, 2)), Replica(shares=(1,)))), [3, 2])
ONE_EMPTY = (Arrangement(division="sharded", replicas=(Replica(shares=(1,)),) * 3), [2, 3, 0])


def hold(env: RankEnvironment, _order: None) -> None:
    """One rank: outputs and gradients under every arrangement are those of one process with the same seed."""
    group = joined(env)
    for case in (PARTS, STRIPS, BOTH):
        _hold(group, Dropping, *case)
    for case in (PARTS, BOTH, ONE_EMPTY):
        _hold(group, Drawing, *case)
    group.barrier()
    leave_group()


def _hold(group: Group, kind: type[nn.Module], arrangement: Arrangement, samples: list[int]) -> None:
    model, x = made(kind)
    torch.manual_seed(7)
    expected = model(x)
    torch.autograd.backward(expected.square().mean(1).mean())
    assert kind is Drawing or 0.1 < float((expected == 0).double().mean()) < 0.6
    place = form_process_mesh(group, arrangement)
    start, number = sum(samples[: place.index]), samples[place.index]
    own = x[start : start + number] if number else x[:1]
    part = ShardedModule(made(kind)[0], place, [own])
    torch.manual_seed(7)
    with nullcontext() if number else part.without_samples():
        found = part(own)
        torch.autograd.backward(found.square().mean(1).mean() * part.share)
    if number:
        assert torch.allclose(found, expected[start : start + number], atol=1e-12), arrangement
    for name, weight in part.part.named_parameters():
        if part.shards[name].layout.state != "split":
            grad = model.get_parameter(name).grad
            assert grad is not None
            assert weight.grad is not None
            assert torch.allclose(weight.grad, grad, atol=1e-12), (arrangement, name)
    part.eval()
    model.eval()
    assert torch.allclose(part(own), model(own), atol=1e-12)


def test_divided_draws_equal_those_of_one_process() -> None:
    start(hold, 3)


def disagree(env: RankEnvironment, _order: None) -> None:
    """One of two ranks, with a random generator in a state of its own."""
    group = joined(env)
    model, x = made()
    place = form_process_mesh(group, Arrangement(division="sharded", replicas=(Replica(shares=(1, 1)),)))
    part = ShardedModule(model, place, [x])
    torch.manual_seed(env.rank)
    part(x)


def test_ranks_with_different_random_states_are_refused() -> None:
    with refused(EvenerError):
        start(disagree, 2)


class Mixing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.head, self.draw = nn.Linear(6, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.head(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("draw", "training", "rule"),
    [
        (lambda y: F.dropout(y, 0.5), False, "also draws random numbers in evaluation"),
        (
            lambda y: y + torch.rand(len(y), len(y)).mean(),
            True,
            "which random numbers of rand.* belong to which sample",
        ),
        (lambda y: sum((torch.rand_like(one) for one in y), start=y), True, "depend on the number of samples"),
    ],
)
def test_draws_that_replicas_cannot_share_are_refused_by_name(draw: Any, training: bool, rule: str) -> None:
    graph = op_graph(Mixing(draw), [torch.zeros(3, 6)], training=training)
    with pytest.raises(InvalidInput, match=rule):
        refuse_own_draws(graph, 3, training)
