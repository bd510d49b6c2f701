"""Pipelines whose stages several ranks divide by filter or channel are one process: gradients, weights, state."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.rules import DivisionName
from evener.parallel.full_state import own_part
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import Criterion
from evener.parallel.pipeline.sharded_stage import StageTeams
from evener.parallel.pipeline.staged import StagedModel
from evener.records.errors import InvalidInput, InvalidValue
from support.pipeline_cases import CASES, TOLERANCE, Case, cost, descend, serial
from support.refusals import refused
from support.thread_ranks import together

Shares = tuple[tuple[float, ...], ...]
UNEVEN: Shares = ((2, 1), (1, 3))
IDLE: Shares = ((1, 0), (2, 3))
THREE_BY_TWO: Shares = ((2, 1), (1, 1), (1, 4))
TWO_BY_THREE: Shares = ((3, 1, 1), (0, 1, 1))
SAMPLES = 7
WHOLE = ("tied", "transformer")
"""Both stages use every layer of the first; linear layers of the second make values with a dim of words."""


def teams_of(division: DivisionName, shares: Shares) -> StageTeams:
    members = len(shares[0])
    ranks = tuple(tuple(range(i * members, (i + 1) * members)) for i in range(len(shares)))
    return StageTeams(division=division, teams=ranks, shares=shares)


def staged(group: Group, case: Case, model: nn.Module, teams: StageTeams, **options: Any) -> StagedModel:
    options = {"example": case.inputs(SAMPLES), "costs": cost, "weigh": case.weigh, "micro_batches": 3, **options}
    criterion = Criterion(loss=case.loss, autocast=nullcontext, scale=lambda loss: loss)
    return StagedModel(model, group, 0, criterion, teams=teams, **options)


def step(model: StagedModel, case: Case) -> float:
    x, y = case.inputs(SAMPLES), case.targets(SAMPLES)
    for parameter in model.parameters():
        parameter.grad = None
    return float(model.add_gradients(x, y, samples=SAMPLES, total=case.weigh(y), is_last=True))


def hold(name: str, division: DivisionName, shares: Shares, **options: Any) -> None:
    """Two steps of stages of several ranks against one process."""
    case, teams = CASES[name], teams_of(division, shares)
    expected, whole_model = serial(case, SAMPLES, options.get("micro_batches", 3)), case.make()

    def rank(group: Group) -> tuple[float, int, dict[str, Tensor]]:
        model = staged(group, case, copy.deepcopy(whole_model), teams, **options)
        for _ in range(2):
            loss = step(model, case)
            gradients = {key: p.grad for key, p in model.pipeline.named_parameters()}
            descend(model.parameters())
        shards, lane = model.pipeline.shards, group.rank % len(shares[0])
        for key, grad in gradients.items():
            whole = expected.gradients[key]
            close(grad, own_part(shards[key], whole, lane) if key in shards else whole, f"gradient of {key}")
        return loss, len(shards), model.gather_weights()

    losses, divided, weights = zip(*together(len(shares) * len(shares[0]), rank), strict=True)
    assert abs(sum(losses) - float(expected.loss)) < TOLERANCE
    assert any(divided) or name in WHOLE
    assert weights[0].keys() == expected.state.keys()
    for key, found in weights[0].items():
        close(found, expected.state[key], key)


def close(found: Tensor | None, expected: Tensor, what: str) -> None:
    assert found is not None, what
    assert found.shape == expected.shape, what
    assert found.numel() == 0 or float((found - expected).abs().max()) < TOLERANCE, what


@pytest.mark.parametrize("shares", [UNEVEN, IDLE], ids=["uneven", "idle"])
@pytest.mark.parametrize("division", ["filter", "channel", "hybrid"])
@pytest.mark.parametrize("name", ["residual", "tied"])
def test_two_stages_of_two_ranks_equal_one_process(name: str, division: DivisionName, shares: Shares) -> None:
    hold(name, division, shares)


def test_ranks_of_an_undivided_stage_compute_all_of_it() -> None:
    case, teams = CASES["tied"], teams_of("filter", UNEVEN)
    whole_model = case.make()

    def rank(group: Group) -> tuple[float, int]:
        pipeline = staged(group, case, copy.deepcopy(whole_model), teams).pipeline
        return pipeline.share, len(pipeline.shards)

    assert together(4, rank) == [(1.0, 0)] * 4


@pytest.mark.parametrize("policy", ["always", "except_last"])
def test_recomputed_stages_of_several_ranks_equal_one_process(policy: str) -> None:
    hold("residual", "filter", UNEVEN, rematerialise=policy, schedule="gpipe")


def test_zero_bubble_is_refused_for_stages_of_several_ranks() -> None:
    with pytest.raises(InvalidValue):
        hold("residual", "filter", UNEVEN, schedule="zero-bubble")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shares", [THREE_BY_TWO, TWO_BY_THREE], ids=["3x2", "2x3"])
@pytest.mark.parametrize("division", ["filter", "channel", "hybrid"])
@pytest.mark.parametrize("name", CASES)
def test_more_stages_and_more_ranks_equal_one_process(name: str, division: DivisionName, shares: Shares) -> None:
    hold(name, division, shares)


def test_stage_optimizers_and_checkpoints_equal_one_process() -> None:
    case, teams = CASES["plain"], teams_of("filter", IDLE)  # with norms, Adam divides rounding by rounding
    alone, whole_model = case.make(), case.make()
    made = torch.optim.AdamW(alone.parameters(), lr=0.01)
    x, y = case.inputs(SAMPLES), case.targets(SAMPLES)
    for _ in range(2):
        made.zero_grad()
        torch.autograd.backward(F.cross_entropy(alone(x), y))
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        made.step()

    def go_on(saved: tuple[Any, Any] | None) -> list[tuple[Any, ...]]:
        def rank(group: Group) -> tuple[Any, ...]:
            model = staged(group, case, copy.deepcopy(whole_model), teams, micro_batches=1)
            optimizer = ModelOptimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), model.held())
            if saved is not None:
                model.load_weights(saved[0])
                optimizer.load(copy.deepcopy(saved[1]))  # ranks do not share memory
            step(model, case)
            model.clip(0.1)
            optimizer.step()
            return model.gather_weights(), optimizer.gather(), model.predict(x) is not None, model.is_reporter

        return together(4, rank)

    rows = go_on(None)
    rows = go_on(rows[0][:2])
    for key, value in alone.state_dict().items():
        close(rows[0][0][key], value, key)
    expected = made.state_dict()
    assert rows[0][1]["param_groups"] == expected["param_groups"]
    for place, values in expected["state"].items():
        for key, value in values.items():
            close(rows[0][1]["state"][place][key], value, f"{place} {key}")
    assert [row[2] for row in rows] == [row[3] for row in rows] == [False, False, True, False]


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 5))
        weight: Any = self.get_parameter("0.weight")
        weight.register_hook(lambda gradient: gradient * 2)


def test_hook_on_a_divided_weight_is_refused() -> None:
    case = Case(Hooked, lambda n: torch.ones(n, 3, dtype=torch.float64), lambda n: torch.zeros(n, dtype=torch.long))
    teams = teams_of("filter", UNEVEN)
    with refused(InvalidInput):
        together(4, lambda group: staged(group, case, case.make(), teams))


def test_teams_must_be_equally_large_and_use_a_whole_value_division() -> None:
    with refused(InvalidValue):
        StageTeams(division="filter", teams=((0, 1), (2,)))
    with refused(InvalidValue):
        StageTeams(division="sharded", teams=((0, 1), (2, 3)))
