"""A program's own loop while nodes divide the layers of its model: what it sees is what one process sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.prepared_layers import PreparedLayers
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.records.errors import InvalidInput
from support.refusals import refused
from support.thread_ranks import together

State = dict[str, Tensor]


class Net(nn.Module):
    """Convolutions, a norm, a tied and an unused layer, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.unused = nn.Conv2d(6, 5, 3, stride=2), nn.Linear(3, 3)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.second(self.norm(self.first(x)).relu()).relu()
        return self.last(hidden.mean((2, 3))), hidden


def run_of(group: Group, strategy: str, shares: str) -> Run:
    env = RankEnvironment(
        rank=group.rank,
        nodes=[NodeSpec(name=name) for name in group.nodes],
        device=group.device,
        patience=10,
        notify=lambda _: None,
    )
    run = Run(env, group, ScriptConfig(script=Path("program.py"), strategy=strategy, shares=shares))
    run.equivalence_check.is_wanted = False
    return run


def made() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def drawn(step: int) -> Tensor:
    return torch.randn(5, 2, 8, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(model: nn.Module, share: Callable[[Tensor], Tensor], steps: int = 3) -> State:
    """A loss between samples, a penalty, accumulation, clipping, a layer that is thawed, a moving average."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = copy.deepcopy(model)
    first = model.get_submodule("first")
    first.requires_grad_(False)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            outputs, hidden = model(share(drawn(2 * step + micro)))
            loss = (outputs @ outputs.t()).logsumexp(1).sum() + hidden.abs().mean()
            torch.autograd.backward(loss + 1e-2 * sum(p.square().sum() for p in model.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        first.requires_grad_(True)
        for own, other in zip(average.parameters(), model.parameters(), strict=True):
            own.data.lerp_(other.data, 0.1)
    model.eval()
    with torch.no_grad():
        found = model(drawn(99))[0] + average(drawn(99))[0]
    return {**model.state_dict(), "found": found}


@pytest.mark.parametrize("shares", ["3,1", "5,2,0"])
@pytest.mark.parametrize("strategy", ["filter", "channel", "sharded", "spatial"])
def test_layer_division_equals_one_process_in_weights_and_statistics(strategy: str, shares: str) -> None:
    model = made()  # not in the threads, which share a generator
    expected = trained(copy.deepcopy(model), lambda x: x)

    def work(group: Group) -> State:
        run = run_of(group, strategy, shares)
        return trained(run.prepare(copy.deepcopy(model)), lambda x: x)

    for state in together(shares.count(",") + 1, work):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("strategy", ["sharded", "spatial"])
def test_sync_batch_norm_preserves_its_class_and_accepts_new_momentum(strategy: str) -> None:
    first = made().first  # not in the threads, which share a generator

    def statistics(kind: type[nn.BatchNorm2d | nn.SyncBatchNorm], prepare: Callable[[nn.Module], nn.Module]) -> State:
        model = prepare(nn.Sequential(copy.deepcopy(first), kind(6).double()))
        for step in range(3):
            for module in model.modules():
                if isinstance(module, kind):
                    module.momentum = 0.5**step
            model(drawn(step)).square().mean().backward()
        with torch.no_grad():  # in training mode, as in a pass that computes statistics anew
            model(drawn(9))
        return copy.deepcopy(model).state_dict()

    expected = statistics(nn.BatchNorm2d, lambda model: model)
    for state in together(2, lambda group: statistics(nn.SyncBatchNorm, run_of(group, strategy, "3,1").prepare)):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_reductions_count_a_fully_replicated_batch_once() -> None:
    def work(group: Group) -> tuple[float, int, float, list[list[float]]]:
        run = run_of(group, "spatial", "equal")
        x = run.share(torch.arange(4.0), count="sum")
        return run.mean(float(x.sum())), run.sum(len(x)), float(run.ratio(x.sum(), 3)), run.gather(x[:, None]).tolist()

    assert together(2, work) == [(6.0, 4, 2.0, [[0.0], [1.0], [2.0], [3.0]])] * 2


def test_generator_and_critic_gradients_equal_one_process() -> None:
    def gradients(generator: nn.Module, critic: nn.Module) -> list[Tensor]:
        torch.autograd.backward(critic(generator(drawn(0)))[0].square().mean())
        return [p.grad for p in (*generator.parameters(), *critic.parameters()) if p.grad is not None]

    def layers() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()).double()

    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = layers()
    second = made()
    expected = gradients(copy.deepcopy(first), copy.deepcopy(second))

    def work(group: Group) -> list[Tensor]:
        run = run_of(group, "spatial", "2,1")
        generator, critic = run.prepare(copy.deepcopy(first), copy.deepcopy(second))
        return gradients(generator, critic)

    for found in together(2, work):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_model_without_positional_tensor_inputs_is_refused() -> None:
    class ByName(nn.Linear):
        def forward(self, input: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return super().forward(input) if scale is None else super().forward(input) * scale

    def work(group: Group) -> None:
        run = run_of(group, "sharded", "equal")
        model = run.prepare(ByName(3, 2))
        x = run.share(torch.ones(4, 3))
        with refused(InvalidInput):
            model(x, scale=x[0])
        with refused(InvalidInput):
            model([x])

    together(2, work)


def test_model_without_divisible_layers_is_reported() -> None:
    arrangement = Arrangement(division="spatial", replicas=(Replica(shares=(2.0, 1.0)),))

    def work(group: Group) -> list[str]:
        told: list[str] = []
        model = PreparedLayers(nn.Linear(3, 2), group, arrangement, told.append, lambda: False).model
        torch.autograd.backward(model(torch.ones(4, 3)).sum())
        return told

    assert together(2, work) == [["no layer of Linear can be divided so: every node computes all of it"]] * 2


def test_batches_that_differ_between_nodes_are_refused() -> None:
    def work(group: Group) -> None:
        run = run_of(group, "sharded", "equal")
        with refused(InvalidInput):
            run.share(torch.full((4, 3), float(group.rank)))

    together(2, work)


class Converted(nn.Linear):
    """A linear layer for inputs of any type."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs in float32."""
        return super().forward(x.float())


@pytest.mark.parametrize("kind", [torch.float64, torch.bool, torch.uint8, torch.bfloat16])
def test_inputs_that_differ_between_nodes_are_refused(kind: torch.dtype) -> None:
    def rank(group: Group) -> None:
        model = run_of(group, "sharded", "3,1").prepare(Converted(64, 4))
        x = torch.randint(
            2 if kind == torch.bool else 256, (500, 64), generator=torch.Generator().manual_seed(group.rank)
        )
        with refused(InvalidInput):
            model(x.to(kind))

    together(2, rank)


def test_losses_that_differ_between_nodes_are_refused() -> None:
    def rank(group: Group) -> None:
        model = run_of(group, "sharded", "3,1").prepare(nn.Linear(4, 4))
        loss = nn.functional.cross_entropy(model(torch.ones(3, 4)), torch.full((3,), group.rank))
        with refused(InvalidInput):
            torch.autograd.backward(loss)

    together(2, rank)


def test_inputs_that_differ_by_rounding_or_are_not_finite_are_taken() -> None:
    def rank(group: Group) -> None:
        model = run_of(group, "sharded", "3,1").prepare(nn.Linear(4, 4))
        x = torch.full((3, 4), 1.0 + 1e-6 * group.rank)
        assert model(x).shape == (3, 4)
        x[0, 0] = float("inf")
        assert model(x).shape == (3, 4)

    together(2, rank)
