"""Programs that take batches from elsewhere than `run.prepare`: a note if nodes took different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener.comm.group import Group
from evener.frontends.programs.entry import finish
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.record import Event
from programs.suite import perform, run_of
from support.program_runs import run_on
from support.thread_ranks import together

Optimizer = torch.optim.Optimizer


def noted(program: Callable[[Run], object], size: int = 2, *, has_others: bool = False) -> list[int]:
    """Return how many notes of different gradients every rank has given.

    Args:
        program: of every rank.
        size: number of ranks.
        has_others: whether replicas have noticed batches from elsewhere while a divided one is current.
    """

    def rank(group: Group) -> int:
        told: list[object] = []
        run = run_on(group, ",".join("3" + "1" * (size - 1)), told.append)
        run.equivalence_check.has_others = run._undivided.has_others = has_others
        program(run)
        run.finish()
        return sum(isinstance(event, Event) and event.kind == "differs" for event in told)

    return together(size, rank)


def prepared(run: Run, model: nn.Module | None = None) -> tuple[nn.Module, Optimizer]:
    """Return a prepared model with known weights, and its optimizer."""
    model = model or nn.Linear(1, 1, dtype=torch.float64)
    for weight in model.parameters():
        nn.init.ones_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    return model, optimizer


def of_rank(rank: int) -> Tensor:
    """Return a batch that differs between ranks, as of a sampler without a seed."""
    return torch.full((4, 1), 1.0 + rank, dtype=torch.float64)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, scale: float = 1.0) -> None:
    """Train on a batch."""
    optimizer.zero_grad()
    torch.autograd.backward(scale * model(x).square().mean())
    optimizer.step()


def batches_of_each_node(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in range(5):
        step(model, optimizer, of_rank(run.rank))


def later_batches_of_each_node(run: Run) -> None:
    model, optimizer = prepared(run)
    for number in range(129):
        step(model, optimizer, of_rank(run.rank if number > 100 else 0), scale=0.1)


def batches_after_an_evaluation(run: Run) -> None:
    model, optimizer = prepared(run)
    loader = run.prepare(DataLoader(TensorDataset(of_rank(0)), batch_size=4))
    with torch.no_grad():
        assert [run.mean(model(x).mean()) for (x,) in loader]
    step(model, optimizer, of_rank(run.rank))


def accumulated_batches(run: Run) -> None:
    model, optimizer = prepared(run)
    for rank in (0, run.rank, 0):
        torch.autograd.backward(model(of_rank(rank)).mean())
    optimizer.step()


def batches_of_a_closure(run: Run) -> None:
    model, _ = prepared(run)
    optimizer = run.prepare(torch.optim.LBFGS(model.parameters(), max_iter=2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(of_rank(run.rank)).square().mean()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)


def updates_without_an_optimizer(run: Run) -> None:
    model, _ = prepared(run)
    torch.autograd.backward(model(of_rank(run.rank)).mean())
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight.data -= 0.1 * weight.grad


def complex_weights(run: Run) -> None:
    model, optimizer = prepared(run, nn.Linear(1, 1, dtype=torch.complex128))
    torch.autograd.backward(model(of_rank(run.rank).to(torch.complex128)).abs().mean())
    optimizer.step()


def few_rows_of_a_table(run: Run, *, sparse: bool = False) -> None:
    model, optimizer = prepared(run, nn.Embedding(20_000, 4, sparse=sparse))
    torch.autograd.backward(model(torch.tensor([7 + run.rank])).square().sum())
    optimizer.step()


def few_sparse_rows_of_a_table(run: Run) -> None:
    few_rows_of_a_table(run, sparse=True)


def batches_after_gathered_rows(run: Run) -> None:
    model, optimizer = prepared(run)
    with torch.no_grad():
        run.gather(model(of_rank(run.rank)))
    step(model, optimizer, of_rank(run.rank))


def batches_with_large_gradients(run: Run) -> None:
    model, optimizer = prepared(run, nn.Linear(1, 1))
    step(model, optimizer, of_rank(run.rank).float(), scale=1e37)


def batches_after_an_overflow(run: Run) -> None:
    model, optimizer = prepared(run)
    step(model, optimizer, of_rank(0), scale=float("inf"))
    for weight in model.parameters():
        nn.init.ones_(weight)
    step(model, optimizer, of_rank(run.rank))


@pytest.mark.parametrize(
    "program",
    [
        batches_of_each_node,
        later_batches_of_each_node,
        batches_after_an_evaluation,
        accumulated_batches,
        batches_of_a_closure,
        updates_without_an_optimizer,
        complex_weights,
        few_rows_of_a_table,
        few_sparse_rows_of_a_table,
        batches_after_gathered_rows,
        batches_after_an_overflow,
        batches_with_large_gradients,
    ],
)
def test_different_batches_of_nodes_are_noted_once(program: Callable[[Run], None]) -> None:
    assert noted(program) == [1, 0]


def equal_batches(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in range(5):
        step(model, optimizer, of_rank(0))


def gathered_rows(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(run.gather(model(of_rank(run.rank))).square().mean())
        optimizer.step()


def dropped_gradients(run: Run, *, set_to_none: bool = True) -> None:
    model, optimizer = prepared(run)
    torch.autograd.backward(model(of_rank(run.rank)).mean())
    optimizer.zero_grad(set_to_none=set_to_none)
    torch.autograd.backward(model(of_rank(0)).mean())
    optimizer.step()


def gradients_set_to_zero(run: Run) -> None:
    dropped_gradients(run, set_to_none=False)


def gradients_of_inputs_after_training(run: Run) -> None:
    model, optimizer = prepared(run)
    step(model, optimizer, of_rank(0))
    torch.autograd.backward(model(of_rank(run.rank).requires_grad_()).mean())


def gradients_that_are_returned(run: Run) -> None:
    model, optimizer = prepared(run)
    torch.autograd.grad(model(of_rank(run.rank)).mean(), list(model.parameters()))
    step(model, optimizer, of_rank(0))


def weights_of_no_model(run: Run) -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = run.prepare(torch.optim.SGD([weight], lr=0.1))
    torch.autograd.backward((of_rank(run.rank) * weight).mean())
    optimizer.step()
    assert float(weight.detach()) == pytest.approx(1 - 0.1 * (1 + run.rank), abs=1e-15)  # as each node alone


def rounding(run: Run) -> None:
    model, optimizer = prepared(run)
    for number in range(40):
        step(model, optimizer, of_rank(0) * 0.7**number * (1 + 1e-3 * run.rank))


def shared(run: Run, count: int = 8) -> Tensor:
    """Return this node's part of a batch."""
    part: Tensor = run.share(torch.arange(float(count), dtype=torch.float64)[:, None])
    return part


def loader_of(run: Run) -> Any:
    """Return a prepared loader of three batches."""
    return run.prepare(DataLoader(TensorDataset(torch.arange(12.0, dtype=torch.float64)[:, None]), batch_size=4))


def batches_after_a_shared_one(run: Run) -> None:
    model, optimizer = prepared(run)
    step(model, optimizer, shared(run))
    for _ in range(3):
        step(model, optimizer, of_rank(run.rank))


def batches_between_shared_ones(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in range(3):
        step(model, optimizer, shared(run))
        step(model, optimizer, of_rank(run.rank))


def batches_after_an_evaluated_shared_one(run: Run) -> None:
    model, optimizer = prepared(run)
    with torch.no_grad():
        model(shared(run))
    step(model, optimizer, of_rank(run.rank))


def batches_after_a_loop_left_early(run: Run) -> None:
    model, optimizer = prepared(run)
    loader = loader_of(run)
    for _ in range(3):
        for (x,) in loader:
            step(model, optimizer, x / 12)
    for (x,) in loader:
        step(model, optimizer, x / 12)
        break
    step(model, optimizer, of_rank(run.rank))


def batches_after_a_first_batch(run: Run) -> None:
    model, optimizer = prepared(run)
    (x,) = next(iter(loader_of(run)))
    step(model, optimizer, x)
    step(model, optimizer, of_rank(run.rank))


def own_batches_inside_a_loop_after_a_shared_one(run: Run) -> None:
    model, optimizer = prepared(run)
    step(model, optimizer, shared(run))
    for (x,) in loader_of(run):
        step(model, optimizer, x)
        step(model, optimizer, of_rank(run.rank))


@pytest.mark.parametrize(
    "program",
    [
        batches_after_a_shared_one,
        batches_between_shared_ones,
        batches_after_an_evaluated_shared_one,
        batches_after_a_loop_left_early,
        batches_after_a_first_batch,
        own_batches_inside_a_loop_after_a_shared_one,
    ],
)
def test_batches_from_elsewhere_after_a_divided_one_are_noted_once(program: Callable[[Run], None]) -> None:
    assert noted(program, has_others=True) == [1, 0]
    assert noted(program) == [0, 0]


def equal_batches_after_a_shared_one(run: Run) -> None:
    model, optimizer = prepared(run)
    step(model, optimizer, shared(run))
    for _ in range(3):
        step(model, optimizer, of_rank(0))


def generated_samples(run: Run) -> None:
    first, one = prepared(run)
    second, two = prepared(run)
    for _ in range(3):
        x = shared(run)
        noise = torch.from_numpy(x.numpy() + 1)
        two.zero_grad()
        torch.autograd.backward(second(x).mean() - second(first(noise).detach()).mean())
        two.step()
        step(nn.Sequential(first, second), one, noise)


def dropped_gradients_of_other_tensors(run: Run) -> None:
    model, optimizer = prepared(run)
    for (x,) in loader_of(run):
        step(model, optimizer, x / 12)
        torch.autograd.backward(model(x / 13).mean())
        optimizer.zero_grad()


def experts_of_some_nodes(run: Run) -> None:
    experts = nn.ModuleList([nn.Linear(1, 1, dtype=torch.float64), nn.Linear(1, 1, dtype=torch.float64)])
    run.prepare(experts)
    first, both = (run.prepare(torch.optim.SGD(some.parameters(), lr=0.01)) for some in (experts[0], experts))
    for (x,) in loader_of(run):
        step(experts[0], first, x / 12)
        step(experts[run.rank], both, x / 12)


@pytest.mark.parametrize(
    "program", [equal_batches_after_a_shared_one, dropped_gradients_of_other_tensors, generated_samples]
)
def test_equal_gradients_of_batches_from_elsewhere_are_not_noted(program: Callable[[Run], None]) -> None:
    assert noted(program, has_others=True) == [0, 0]


def test_nodes_compare_alike_if_each_trains_other_weights() -> None:
    assert noted(experts_of_some_nodes, has_others=True) == [1, 0]
    assert noted(experts_of_some_nodes) == [0, 0]


@pytest.mark.parametrize(
    "program",
    [
        equal_batches,
        gathered_rows,
        dropped_gradients,
        gradients_set_to_zero,
        gradients_of_inputs_after_training,
        gradients_that_are_returned,
        weights_of_no_model,
        rounding,
    ],
)
def test_equal_gradients_and_unused_ones_are_not_noted(program: Callable[[Run], None]) -> None:
    assert noted(program) == [0, 0]


def test_gradients_of_a_divided_batch_are_not_noted() -> None:
    def rank(group: Group) -> list[object]:
        told: list[object] = []
        run = run_on(group, "3,1", told.append)
        model, optimizer = prepared(run)
        step(model, optimizer, run.share(torch.arange(4.0, dtype=torch.float64)[:, None]))
        return [event for event in told if isinstance(event, Event)]

    assert together(2, rank) == [[], []]


def test_third_node_with_another_batch_is_noted() -> None:
    def program(run: Run) -> None:
        model, optimizer = prepared(run)
        step(model, optimizer, of_rank(run.rank // 2))

    assert noted(program, 3) == [1, 0, 0]


@pytest.mark.parametrize("is_divided", [False, True])
def test_model_that_is_frozen_before_the_backward_pass_trains_as_alone(is_divided: bool) -> None:
    """A GAN's discriminator gets no gradient of the generator's loss."""

    def program(run: Run) -> Any:
        (first, one), (second, _) = prepared(run), prepared(run)
        batch = torch.arange(4.0, dtype=torch.float64)[:, None]
        loss = second(first(run.share(batch) if is_divided else batch)).square().mean()
        second.requires_grad_(False)
        torch.autograd.backward(loss)
        second.requires_grad_(True)
        one.step()
        return [weight.detach().clone() for weight in (*first.parameters(), *second.parameters())]

    alone = together(1, lambda group: program(run_on(group, "1")))[0]
    for weights in together(2, lambda group: program(run_on(group, "3,1"))):
        for weight, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-14, atol=0)


PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

run = evener.join()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=16)
model, optimizer, loader = run.prepare(model, optimizer, loader)
frozen = run.prepare(nn.Linear(4, 4)).requires_grad_(False)
own = torch.Generator()
own.manual_seed({seed})

def step(x):
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()

{steps}
results = model.state_dict()
"""
OTHERS_AFTER_A_SHARED_BATCH = """
step(run.share(torch.ones(16, 4)))
for _ in range(5):
    step(torch.randn(16, 4, generator=own))
"""
OTHERS_AFTER_A_FIRST_BATCH = """
(x,) = next(iter(loader))
step(x)
for _ in range(5):
    step(torch.randn(16, 4, generator=own))
"""
SEVERAL_UPDATES_BY_A_BATCH = """
for epoch in run.epochs(2):
    for (x,) in loader:
        features = frozen(x)
        for made in (features, features, torch.from_numpy(x.numpy()) / 2, torch.randn(len(x), 4)):
            step(made)
for (x,) in loader:
    break
for _ in range(3):
    step(x / 2)
"""


def rank_of_program(env: RankEnvironment, text: str) -> None:
    """A rank that performs a program."""
    run = run_of(env, "3,1")
    perform(text, "program")
    finish(run, env)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("steps", "seed", "number"),
    [
        (OTHERS_AFTER_A_SHARED_BATCH, "run.rank", 1),
        (OTHERS_AFTER_A_FIRST_BATCH, "run.rank", 1),
        (OTHERS_AFTER_A_SHARED_BATCH, "0", 0),
        (SEVERAL_UPDATES_BY_A_BATCH, "0", 0),
    ],
    ids=["after a shared batch", "after a first batch", "equal on all nodes", "made from parts"],
)
def test_check_notices_batches_from_elsewhere(steps: str, seed: str, number: int) -> None:
    events: list[object] = []
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    text = PROGRAM.format(seed=seed, steps=steps)
    run_local(rank_of_program, nodes, text, patience=10, on_event=events.append)
    assert sum(isinstance(event, Event) and event.kind == "differs" for event in events) == number
