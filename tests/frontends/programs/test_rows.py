"""Rows of all ranks together: a loss between samples is that of one process, whatever each rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.frontends.programs.work_division import gather_rows
from evener.records.errors import InvalidInput
from support.refusals import refused
from support.thread_ranks import together


def between(rows: Tensor) -> Tensor:
    return (rows @ rows.t()).logsumexp(1).mean()


@pytest.mark.parametrize("sizes", [[3, 1], [4, 2, 0]])
@pytest.mark.parametrize("of_own_rows", [False, True])
def test_gathered_row_gradients_equal_one_process(sizes: list[int], of_own_rows: bool) -> None:
    """Whether every rank computes the whole loss, or the mean over its own rows."""
    whole = torch.randn(sum(sizes), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = whole.clone().requires_grad_()
    torch.autograd.backward(between(leaf * 2))

    def work(group: Group) -> Tensor:
        n, first = sizes[group.rank], sum(sizes[: group.rank])
        weight = group.size * n / sum(sizes)
        own = whole[first : first + n].clone() if n else whole[:2].clone()
        own.requires_grad_()
        rows = gather_rows(own * 2, group, weight)
        assert torch.equal(rows, whole * 2)
        logits = rows @ rows.t()
        loss = logits[first : first + n].logsumexp(1).mean() if of_own_rows and n else between(rows)
        torch.autograd.backward(loss)
        assert own.grad is not None
        return own.grad[:n] * weight / group.size  # as it is weighed and averaged later on

    assert leaf.grad is not None
    assert torch.allclose(torch.cat(together(len(sizes), work)), leaf.grad, rtol=0, atol=1e-14)


def test_rows_of_mismatched_shapes_are_refused() -> None:
    with refused(InvalidInput):
        together(2, lambda group: gather_rows(torch.ones(2, 2 + group.rank), group, 1.0))
    with refused(InvalidInput):
        together(1, lambda group: gather_rows(torch.ones(()), group, 1.0))
