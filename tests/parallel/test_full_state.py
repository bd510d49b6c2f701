"""Weights and optimiser state of a divided model are those of one process, and go on under any other arrangement."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from evener.records.errors import InvalidInput
from support.compare_divided import close
from support.division_networks import residual_net
from support.refusals import refused
from support.thread_ranks import together

WAYS = {
    "sharded": Arrangement(division="sharded", replicas=(Replica(shares=(5, 2, 1)),)),
    "idle": Arrangement(division="filter", replicas=(Replica(shares=(1, 0, 2)),)),
    "spatial": Arrangement(division="spatial", replicas=(Replica(shares=(2, 3)),)),
    "data+channel": Arrangement(division="channel", replicas=(Replica(shares=(2, 1)), Replica(shares=(1,)))),
}
BATCHES = [torch.randn(4, 3, 13, 15, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return residual_net().double()


NETWORK = _network()
"""Made once: threads share the random generator. Nobody trains it; parts of it are copies."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def descend(forward: Any, optimizer: torch.optim.Optimizer, x: Tensor, weigh: Any) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(forward(x).square().mean(1).mean() * weigh())
    optimizer.step()


@pytest.fixture(scope="module")
def serial() -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """One process: weights and optimiser's state after two and after four steps."""
    model, found = copy.deepcopy(NETWORK), []
    optimizer = adam(model.parameters())
    for i, x in enumerate(BATCHES):
        descend(model, optimizer, x, lambda: 1.0)
        if i % 2:
            found.append((copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())))
    return found


class Trainer:
    """One rank's part of the network, with its optimiser."""

    def __init__(self, group: Group, arrangement: Arrangement) -> None:
        place = form_process_mesh(group, arrangement)
        count = [4] if len(arrangement.replicas) == 1 else [3, 1]
        start = sum(count[: place.index])
        self.own = slice(start, start + count[place.index])
        self.model = ShardedModule(NETWORK, place, [BATCHES[0][self.own]])
        self.optimizer = ModelOptimizer(adam, self.model.held())

    def train(self, batches: list[Tensor]) -> None:
        for x in batches:
            descend(self.model, self.optimizer.inner, x[self.own], lambda: self.model.share)

    def gathered(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.model.gather_weights(), self.optimizer.gather()


def hold(found: tuple[dict[str, Tensor], dict[str, Any]], expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    weights, state = found
    assert list(weights) == list(expected[0])
    for name, value in expected[0].items():
        close(weights[name], value, name)
    assert state["param_groups"] == expected[1]["param_groups"]
    assert state["state"].keys() == expected[1]["state"].keys()
    for index, values in expected[1]["state"].items():
        assert state["state"][index].keys() == values.keys()
        for key, value in values.items():
            close(torch.as_tensor(state["state"][index][key]).double(), value.double(), f"{key} of weight {index}")


@pytest.mark.parametrize("way", WAYS)
def test_gathered_state_equals_one_process(way: str, serial: list[Any]) -> None:
    arrangement = WAYS[way]

    def work(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
        trainer = Trainer(group, arrangement)
        trainer.train(BATCHES[:2])
        return trainer.gathered()

    found = together(arrangement.size, work)
    hold(found[0], serial[0])
    for i in range(len(arrangement.replicas)):
        first, *others = arrangement.ranks_of(i)
        assert found[first][0].keys() == serial[0][0].keys()
        assert all(found[other] == ({}, {}) for other in others)


@pytest.mark.parametrize(("before", "after"), [("sharded", "spatial"), ("spatial", "idle"), ("idle", "data+channel")])
def test_training_continues_under_another_arrangement(before: str, after: str, serial: list[Any]) -> None:
    def begin(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
        trainer = Trainer(group, WAYS[before])
        trainer.train(BATCHES[:2])
        return trainer.gathered()

    weights, state = together(WAYS[before].size, begin)[0]

    def go_on(group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
        trainer = Trainer(group, WAYS[after])
        trainer.model.load_weights(weights)
        trainer.optimizer.load(copy.deepcopy(state))
        trainer.train(BATCHES[2:])
        return trainer.gathered()

    hold(together(WAYS[after].size, go_on)[0], serial[1])


def test_plain_state_dict_loads_and_a_wrong_one_is_refused(serial: list[Any]) -> None:
    weights = serial[0][0]

    def work(group: Group) -> None:
        trainer = Trainer(group, WAYS["sharded"])
        trainer.model.load_weights(weights)
        found = trainer.model.gather_weights()
        assert all(torch.equal(found[name], value) for name, value in weights.items() if group.is_leader)
        with refused(InvalidInput):
            trainer.model.load_weights({"other" if k == "0.weight" else k: v for k, v in weights.items()})
        with refused(InvalidInput):
            trainer.model.load_weights({**weights, "0.weight": torch.zeros(2)})

    together(3, work)


def test_rank_holds_its_share_of_weights_gradients_and_state() -> None:
    whole = sum(p.numel() for p in NETWORK.parameters())

    def work(group: Group) -> list[int]:
        trainer = Trainer(group, Arrangement(division="sharded", replicas=(Replica(shares=(3, 1)),)))
        trainer.train(BATCHES[:1])
        weights = list(trainer.model.part.parameters())
        moments = [v for values in trainer.optimizer.inner.state.values() for v in values.values() if v.dim()]
        assert sum(p.grad.numel() for p in weights if p.grad is not None) == sum(p.numel() for p in weights)
        assert sum(m.numel() for m in moments) == 2 * sum(p.numel() for p in weights)
        return [sum(p.numel() for p in weights)]

    larger, smaller = (held for (held,) in together(2, work))
    assert larger == pytest.approx(0.75 * whole, rel=0.1)
    assert smaller == pytest.approx(0.25 * whole, rel=0.25)  # of widths such as 5 nobody has a quarter
    assert larger + smaller == pytest.approx(whole, rel=0.01)  # hardly anything is on both


@pytest.mark.parametrize("way", WAYS)
def test_divided_evaluation_equals_one_process_for_any_batch_size(way: str) -> None:
    arrangement = WAYS[way]
    alone = copy.deepcopy(NETWORK)
    optimizer = adam(alone.parameters())
    for x in BATCHES[:2]:
        descend(alone, optimizer, x, lambda: 1.0)
    asked = torch.cat(BATCHES)[:7]
    expected = alone.eval()(asked).detach()

    def work(group: Group) -> None:
        trainer = Trainer(group, arrangement)
        trainer.train(BATCHES[:2])
        trainer.model.eval()
        with torch.no_grad():
            for samples in (4, 7, 1):
                close(trainer.model(asked[:samples]), expected[:samples], f"answers of {samples} samples")

    together(arrangement.size, work)


@pytest.mark.parametrize("way", ["sharded", "spatial"])
def test_autocast_layers_compute_in_bf16_as_in_one_process(way: str) -> None:
    arrangement, model = WAYS[way], copy.deepcopy(NETWORK).float()
    x = BATCHES[0].float()
    with torch.no_grad():
        exact = copy.deepcopy(model)(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = copy.deepcopy(model)(x)
    rounding = float((expected.float() - exact).abs().max())

    def work(group: Group) -> None:
        place = form_process_mesh(group, arrangement)
        part = ShardedModule(model, place, [x])
        with torch.autocast("cpu", torch.bfloat16):
            found = part(x)
            loss = found.float().square().mean() * part.share
        torch.autograd.backward(loss)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert float((found.detach().float() - expected.float()).abs().max()) < 4 * rounding
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in part.part.parameters() if p.numel())

    together(arrangement.size, work)
