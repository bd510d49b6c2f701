"""Whatever an optimiser looks at, ranks that hold parts of a model make the steps of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.optimizer_probe import scope_of
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import DividedModel
from evener.records.errors import InvalidInput, TrainingFailed
from support.compare_divided import close
from support.refusals import refused
from support.thread_ranks import together

Rule = Callable[[Tensor, Tensor, dict[str, Any]], Any]
Make = Callable[[Any], Optimizer]


class ByTensor(Optimizer):
    """Updates each parameter by a function of it, its gradient and its state."""

    def __init__(self, parameters: Any, rule: Rule) -> None:
        super().__init__(parameters, {"lr": 0.02})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self._rule(p, p.grad, self.state[p]), alpha=group["lr"])


def lars(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad * p.norm() / (grad.norm() + 1e-3)


def lamb(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * grad
    state["v"] = 0.99 * state.get("v", torch.zeros_like(p)) + 0.01 * grad.square()
    update = state["m"] / (state["v"].sqrt() + 1e-4) + 0.01 * p
    return update * p.norm() / (update.norm() + 1e-6)


def muon(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    if p.dim() < 2:
        return grad
    state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + grad
    x = state["m"].flatten(1) / (state["m"].norm() + 1e-3)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.t() @ x
    return x.view_as(p)


def centralised(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
    return grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad


class ClipsInside(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


def by_dims(parameters: Any) -> Optimizer:
    listed = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in reversed(listed) if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in listed if p.dim() <= 1]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def by_place_and_size(parameters: Any) -> Optimizer:
    groups = [{"params": [p], "lr": 0.1 * 0.8**i / p.shape[0]} for i, p in enumerate(parameters)]
    return torch.optim.SGD(groups, momentum=0.9)


def rule(of: Rule) -> Make:
    return lambda parameters: ByTensor(parameters, of)


ELEMENT: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5, eps=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "averaged": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "some weights": lambda p: torch.optim.Adam([one for one in p if one.dim() > 1], lr=1e-2),
    "groups by dims": by_dims,
    "groups by place and size": by_place_and_size,
}
TENSOR: dict[str, Make] = {
    "lars": rule(lars),
    "lamb": rule(lamb),
    "muon": rule(muon),
    "centralised": rule(centralised),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
MODEL: dict[str, Make] = {
    "clips": lambda p: ClipsInside(p, lr=0.5, momentum=0.9),
    "noisy": lambda p: Noisy(p, lr=0.5),
}
STEPPED = {**ELEMENT, **TENSOR, "clips": MODEL["clips"]}
WAYS = {
    "sharded": Arrangement(division="sharded", replicas=(Replica(shares=(7, 2, 1)),)),
    "idle": Arrangement(division="filter", replicas=(Replica(shares=(5, 0, 3)),)),
    "channel": Arrangement(division="channel", replicas=(Replica(shares=(2, 1)),)),
    "data+sharded": Arrangement(division="sharded", replicas=(Replica(shares=(3, 1)), Replica(shares=(1, 2)))),
}
CRITERION = Criterion(loss=nn.functional.cross_entropy, autocast=nullcontext, scale=lambda loss: loss)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


NETWORK = network()
BATCHES = [torch.randn(10, 3, 6, 6, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
TARGETS = torch.arange(10) % 3


@pytest.mark.parametrize("name", [*ELEMENT, *TENSOR, *MODEL])
def test_probe_detects_the_scope_of_an_optimizer(name: str) -> None:
    expected = "element" if name in ELEMENT else "tensor" if name in TENSOR else "model"
    shapes = [tuple(p.shape) for p in NETWORK.parameters()]
    assert scope_of({**STEPPED, **MODEL}[name], shapes, torch.device("cpu")) == expected


def test_probe_preserves_the_random_state() -> None:
    before = torch.get_rng_state()
    scope_of(MODEL["noisy"], [(3, 3)], torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


def test_probe_sees_settings_for_large_tensors() -> None:
    def make(parameters: Any) -> Optimizer:
        listed = list(parameters)
        return ByTensor(listed, lars) if listed[0].numel() > 10**12 else torch.optim.SGD(listed, lr=0.1)

    assert scope_of(make, [(10**7, 10**7)], torch.device("cpu")) == "tensor"
    assert scope_of(make, [(10, 10)], torch.device("cpu")) == "element"


def serial(make: Make) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = copy.deepcopy(NETWORK)
    optimizer = make(model.parameters())
    for x in BATCHES:
        optimizer.zero_grad()
        torch.autograd.backward(CRITERION.loss(model(x), TARGETS))
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()


def train(model: ParallelModel, optimizer: ModelOptimizer, rows: slice, batches: list[Tensor]) -> None:
    count = rows.stop - rows.start
    for x in batches:
        model.add_gradients(x[rows], TARGETS[rows], samples=count, total=10, is_last=True)
        optimizer.step()
        optimizer.clear_gradients()


def divided(group: Group, way: str) -> tuple[DividedModel, slice]:
    mesh = form_process_mesh(group, WAYS[way])
    rows = slice(0, 10) if len(WAYS[way].replicas) == 1 else (slice(0, 7), slice(7, 10))[mesh.index]
    return DividedModel(NETWORK, mesh, BATCHES[0][rows], CRITERION), rows


def staged(group: Group) -> tuple[StagedModel, slice]:
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "costs": "estimated"}
    model = StagedModel(copy.deepcopy(NETWORK), group, 0, CRITERION, example=BATCHES[0], **options)
    return model, slice(0, 10)


def hold(found: tuple[dict[str, Tensor], dict[str, Any]], make: Make) -> None:
    (weights, state), (right, right_state) = found, serial(make)
    for name, value in right.items():
        close(weights[name], value, name)
    assert state["param_groups"] == right_state["param_groups"]
    assert state["state"].keys() == right_state["state"].keys()
    for index, values in right_state["state"].items():
        assert state["state"][index].keys() == values.keys()
        for key, value in values.items():
            is_tensor = isinstance(value, Tensor)
            assert is_tensor == isinstance(state["state"][index][key], Tensor)
            if is_tensor:
                close(state["state"][index][key].double(), value.double(), f"{key} of weight {index}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPPED)
def test_optimizer_steps_on_divided_layers_equal_one_process(name: str, way: str) -> None:
    make = STEPPED[name]

    def work(group: Group) -> Any:
        model, rows = divided(group, way)
        optimizer = ModelOptimizer(make, model.held())
        assert optimizer.is_gathered == (name not in ELEMENT)
        train(model, optimizer, rows, BATCHES)
        return model.gather_weights(), optimizer.gather()

    hold(together(WAYS[way].size, work)[0], make)


@pytest.mark.parametrize("name", STEPPED)
def test_optimizer_steps_on_stages_equal_one_process(name: str) -> None:
    make = STEPPED[name]

    def work(group: Group) -> Any:
        model, rows = staged(group)
        optimizer = ModelOptimizer(make, model.held())
        assert optimizer.is_gathered == (name == "clips")
        train(model, optimizer, rows, BATCHES)
        return model.gather_weights(), optimizer.gather()

    hold(together(2, work)[0], make)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "lamb", "muon", "clips", "groups by dims"])
@pytest.mark.parametrize(("before", "after"), [("sharded", "idle"), ("channel", "stages"), ("stages", "data+sharded")])
def test_training_continues_under_another_division(name: str, before: str, after: str) -> None:
    make = STEPPED[name]

    def part(group: Group, way: str) -> tuple[Any, slice, ModelOptimizer]:
        model, rows = staged(group) if way == "stages" else divided(group, way)
        return model, rows, ModelOptimizer(make, model.held())

    def begin(group: Group) -> Any:
        model, rows, optimizer = part(group, before)
        train(model, optimizer, rows, BATCHES[:2])
        return copy.deepcopy((model.gather_weights(), optimizer.gather()))

    def go_on(group: Group) -> Any:
        model, rows, optimizer = part(group, after)
        model.load_weights(weights)
        optimizer.load(copy.deepcopy(state))
        train(model, optimizer, rows, BATCHES[2:])
        return model.gather_weights(), optimizer.gather()

    def size(way: str) -> int:
        return 2 if way == "stages" else WAYS[way].size

    weights, state = together(size(before), begin)[0]
    hold(together(size(after), go_on)[0], make)


def test_optimizer_that_computes_losses_is_refused() -> None:
    def work(group: Group) -> None:
        with refused(InvalidInput):
            ModelOptimizer(torch.optim.LBFGS, divided(group, "channel")[0].held())

    together(2, work)


def test_optimizer_tensors_outside_the_model_are_refused() -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], lr=0.1)

    def work(group: Group) -> None:
        with refused(InvalidInput):
            ModelOptimizer(make, divided(group, "channel")[0].held())

    together(2, work)


def test_error_in_a_user_optimizer_names_its_line() -> None:
    def missing(p: Tensor, grad: Tensor, state: dict[str, Any]) -> Any:
        return grad * state["momentum"]

    def make(parameters: Any) -> Optimizer:
        raise KeyError("name of a weight")

    def work(group: Group) -> None:
        model, rows = divided(group, "channel")
        with refused(InvalidInput):
            ModelOptimizer(make, model.held())
        optimizer = ModelOptimizer(rule(missing), model.held())
        with refused(TrainingFailed):
            train(model, optimizer, rows, BATCHES[:1])

    together(2, work)
