"""Moves in a graph: each one's gradient is that of one process, in which all ranks' losses are added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.oracle.division.layout import ALIKE, PARTIAL, WHOLE, Layout, Move, split
from evener.parallel.redistribute import mover
from support.thread_ranks import together

SPLIT = split({0: (((0, 3),), ((3, 4),), ())})
X = torch.arange(1.0, 5.0, dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


def own(rank: int) -> Tensor:
    return X[(0, 3, 4)[rank] : (3, 4, 4)[rank]].clone().requires_grad_()


def gradient(y: Tensor, x: Tensor, weight: float | Tensor) -> Tensor:
    torch.autograd.backward((y.square() * weight).sum())
    assert x.grad is not None
    return x.grad


def moved(group: Group, x: Tensor, have: Layout, need: Layout, size: int = 4) -> Tensor:
    return mover(Move(0, (size,), group.size, have, need), group)(x)


def by_rank(work: Callable[[Group], Tensor]) -> list[list[float]]:
    return [x.tolist() for x in together(3, work)]


def test_gather_sums_gradients_of_all_ranks_backward() -> None:
    def work(group: Group) -> Tensor:
        x = own(group.rank)
        return gradient(moved(group, x, SPLIT, WHOLE), x, float(WEIGHTS[group.rank]))

    assert by_rank(work) == [[222, 444, 666], [888], []]


def test_reduce_scatter_gathers_gradients_backward() -> None:
    def work(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(moved(group, x, PARTIAL, SPLIT), x, 1.0)

    assert by_rank(work) == [[6, 12, 18, 24]] * 3


def test_gather_of_replicated_work_skips_the_sum_backward() -> None:
    def work(group: Group) -> Tensor:
        x = own(group.rank)
        return gradient(moved(group, x, SPLIT, ALIKE), x, 1.0)

    assert by_rank(work) == [[2, 4, 6], [8], []]


def test_slice_of_a_replicated_value_gets_the_gradient_of_all_ranks() -> None:
    def work(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(moved(group, x, ALIKE, SPLIT), x, 1.0)

    assert by_rank(work) == [[2, 4, 6, 8]] * 3


@pytest.mark.parametrize(("need", "expected"), [(WHOLE, 3 * 2 * 111), (ALIKE, 3 * 2)], ids=["whole", "alike"])
def test_all_reduce_of_addends_has_the_right_gradient(need: Layout, expected: float) -> None:
    def work(group: Group) -> Tensor:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        y = moved(group, x, PARTIAL, need, 1)
        return gradient(y, x, float(WEIGHTS[group.rank]) if need is WHOLE else 1.0)

    assert by_rank(work) == [[expected]] * 3


def test_whole_and_replicated_layouts_differ_only_in_gradients() -> None:
    def there(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(moved(group, x, ALIKE, WHOLE), x, float(WEIGHTS[group.rank]))

    def back(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(moved(group, x, WHOLE, ALIKE), x, 3.0)

    assert by_rank(there) == [[222, 444, 666, 888]] * 3
    assert [[round(v, 9) for v in row] for row in by_rank(back)] == [[2, 4, 6, 8]] * 3
