"""Holds a divided model against one process: outputs, gradients, weights after some steps, statistics, and bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evener.comm.group import Group
from evener.oracle.division.plan import Arrangement, plan_replica
from evener.parallel.op_graph import op_graph
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.redistribute import part_of
from evener.parallel.sharded import ShardedModule
from support.division_networks import CASES
from support.step_traffic import step_traffic

STEPS = 3


@dataclass(frozen=True)
class Serial:
    """What one process gives.

    Attributes:
        model: before the first step.
        rate: of learning.
        inputs: of each step.
        outputs: of each step.
        input_grads: of the first step.
        grads: of the first step, by name.
        state: after all steps.
    """

    model: nn.Module
    rate: float
    inputs: list[Tensor]
    outputs: list[list[Tensor]]
    input_grads: Tensor
    grads: dict[str, Tensor]
    state: dict[str, Tensor]


@functools.cache
def serial(name: str) -> Serial:
    """One process that trains network `name`."""
    torch.manual_seed(0)
    return train(CASES[name].build().double(), CASES[name].shape)


def train(model: nn.Module, shape: tuple[int, ...], rate: float = 0.02) -> Serial:
    """One process that trains `model` on random inputs."""
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    trained = copy.deepcopy(model)
    optimizer = new_optimizer(trained, rate)
    outputs, grads, input_grads = [], {}, torch.empty(0)
    for step, x in enumerate(inputs):
        given = x.clone().requires_grad_(step == 0)
        outputs.append(forward_backward(trained, given, 1.0))
        if step == 0:
            assert given.grad is not None
            input_grads = given.grad
            grads = {n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Serial(model, rate, inputs, outputs, input_grads, grads, trained.state_dict())


def new_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)


def forward_backward(model: nn.Module, x: Tensor, share: float | None) -> list[Tensor]:
    """Outputs, after the backward pass of a loss that is the mean over samples."""
    outputs: list[Tensor] = pytree.tree_leaves(model(x))
    losses = [(out.tanh() * (1 + out)).flatten(1).mean(1).mean() for out in outputs]
    weight = model.share if share is None else share
    torch.autograd.backward(torch.stack(losses).sum() * weight)  # type: ignore[operator]
    return [out.detach() for out in outputs]


def hold_against(
    group: Group, expected: Serial, arrangement: Arrangement, samples: Sequence[int], recompute: bool = False
) -> Tensor:
    """One rank: train its part of a network, compare everything; returns its part of the inputs' gradient."""
    place = form_process_mesh(group, arrangement)
    start, count = sum(samples[: place.index]), samples[place.index]
    own = [x[start : start + count].clone() for x in expected.inputs]
    model = ShardedModule(expected.model, place, own[:1], recompute)
    optimizer = new_optimizer(model.part, expected.rate)
    before = dict(group.traffic.sent), dict(group.traffic.received)
    for step, x in enumerate(own):
        outputs = forward_backward(model, x.requires_grad_(step == 0), None)
        for found, whole in zip(outputs, expected.outputs[step], strict=True):
            close(found, whole[start : start + count], f"outputs of step {step}")
        if step == 0:
            if not recompute:  # else forward moves travel twice
                compare_traffic(model, expected.model, group, before, [(n, *x.shape[1:]) for n in samples])
            compare_weights(model, {n: p.grad for n, p in model.part.named_parameters()}, expected.grads, "gradient")
        optimizer.step()
        optimizer.zero_grad()
    compare_weights(model, model.part.state_dict(), expected.state, "weight")
    grad = own[0].grad
    assert grad is not None
    return grad


def compare_weights(model: ShardedModule, found: dict[str, Any], expected: dict[str, Tensor], what: str) -> None:
    """This rank's parts of weights or gradients against the whole ones."""
    for name, whole in expected.items():
        shard = model.shards[name]
        own = part_of(whole, shard.layout.region(model.mesh.group.rank, shard.shape))
        if own.numel():
            close(found[name], own, f"{what} of {name}")


def compare_traffic(model: ShardedModule, whole: nn.Module, group: Group, before: Any, shapes: list[Any]) -> None:
    """Bytes that were counted in the first step against those that the oracle predicts."""
    networks = [op_graph(whole, [torch.empty(shape, dtype=torch.float64)]).network for shape in shapes]
    plans = [
        plan_replica(network, model.mesh.arrangement.division, replica, before=plan)
        for network, replica, plan in zip(networks, model.mesh.arrangement.replicas, model.plans, strict=True)
    ]
    predicted = step_traffic(plans, model.mesh.arrangement, 8, inputs_need_gradients=True)[group.rank]
    for way, counted in enumerate((group.traffic.sent, group.traffic.received)):
        found = {k: round(v - before[way].get(k, 0)) for k, v in counted.items() if round(v - before[way].get(k, 0))}
        wanted = {k: round(v[way]) for k, v in predicted.items() if round(v[way])}
        assert found == wanted, f"bytes {('sent', 'received')[way]}: counted {found}, predicted {wanted}"


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} for {tuple(expected.shape)}"
    if expected.numel():
        scale = max(1.0, float(expected.abs().max()))
        error = float((found.detach() - expected).abs().max()) / scale
        assert error <= tolerance, f"{what}: {error}"


def gradient_of_inputs(parts: list[Tensor], arrangement: Arrangement) -> Tensor:
    """The whole gradient: the sum over each replica's ranks, replica by replica."""
    return torch.cat(
        [torch.stack([parts[r] for r in arrangement.ranks_of(i)]).sum(0) for i in range(len(arrangement.replicas))]
    )
