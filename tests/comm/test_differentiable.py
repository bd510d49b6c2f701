"""Collectives in a graph: each one's gradient is that of one process, in which all ranks' losses are added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evener.comm.differentiable import (
    all_gather,
    all_reduce,
    copy_from_parallel,
    copy_to_parallel,
    gather_from_parallel,
    reduce_from_parallel,
    reduce_scatter,
    scatter_to_parallel,
)
from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from support.thread_ranks import together

OWN = ((((0, 3),),), (((3, 4),),), ((),))
ALL = ((((0, 4),),),) * 3
X = torch.arange(1.0, 5.0, dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)


def own(rank: int) -> Tensor:
    return X[(0, 3, 4)[rank] : (3, 4, 4)[rank]].clone().requires_grad_()


def gradient(y: Tensor, x: Tensor, weight: float | Tensor) -> Tensor:
    torch.autograd.backward((y.square() * weight).sum())
    assert x.grad is not None
    return x.grad


def gather(group: Group) -> Exchange:
    return Exchange(group, [Route(OWN, ALL)], "gather")


def by_rank(work: Callable[[Group], Tensor]) -> list[list[float]]:
    return [x.tolist() for x in together(3, work)]


def test_spread_sums_what_each_rank_makes_of_a_value() -> None:
    def work(group: Group) -> Tensor:
        x = own(group.rank)
        return gradient(all_gather(gather(group), x)[0], x, float(WEIGHTS[group.rank]))

    assert by_rank(work) == [[222, 444, 666], [888], []]


def test_collect_is_its_transpose() -> None:
    def work(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(reduce_scatter(gather(group), x)[0], x, 1.0)

    assert by_rank(work) == [[6, 12, 18, 24]] * 3


def test_what_all_ranks_do_alike_is_gathered_without_a_sum_backward() -> None:
    def work(group: Group) -> Tensor:
        x = own(group.rank)
        return gradient(gather_from_parallel(gather(group), x), x, 1.0)

    assert by_rank(work) == [[2, 4, 6], [8], []]


def test_a_part_of_what_is_alike_gets_the_gradient_of_all() -> None:
    def work(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(scatter_to_parallel(gather(group), x), x, 1.0)

    assert by_rank(work) == [[2, 4, 6, 8]] * 3


@pytest.mark.parametrize(("add", "expected"), [(all_reduce, 3 * 2 * 111), (reduce_from_parallel, 3 * 2)])
def test_a_sum_of_addends(add: Callable[[Group, Tensor], Tensor], expected: float) -> None:
    def work(group: Group) -> Tensor:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        return gradient(add(group, x), x, float(WEIGHTS[group.rank]) if add is all_reduce else 1.0)

    assert by_rank(work) == [[expected]] * 3


def test_between_whole_and_alike_only_the_gradient_changes() -> None:
    def there(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(copy_to_parallel(group, x), x, float(WEIGHTS[group.rank]))

    def back(group: Group) -> Tensor:
        x = X.clone().requires_grad_()
        return gradient(copy_from_parallel(group, x), x, 3.0)

    assert by_rank(there) == [[222, 444, 666, 888]] * 3
    assert [[round(v, 9) for v in row] for row in by_rank(back)] == [[2, 4, 6, 8]] * 3
