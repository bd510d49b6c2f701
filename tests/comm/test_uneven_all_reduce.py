"""Sums whose elements have owners are those of all ranks, with the same bits on each, for the promised bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.abortable import AbortableGloo
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.comm.uneven_all_reduce import PIECE_BYTES, UnevenAllReduce
from evener.oracle.all_reduce_shares import bytes_of_uneven_all_reduce
from evener.records.errors import NodeLost
from support.refusals import refused

SHARES = [(1, 1), (0, 1), (2, 1, 0), (0, 0, 1), (3, 5, 1, 0), (1, 2, 0, 1, 1, 3)]


@contextmanager
def groups(size: int) -> Iterator[list[AbortableGloo]]:
    """One of each rank, in this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> AbortableGloo:
        return AbortableGloo(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30)))

    with ThreadPoolExecutor(size) as threads:
        joined = list(threads.map(join, range(size)))
    try:
        yield joined
    finally:
        for sums in joined:
            sums.abort(NodeLost("the test is over"))
        deadline = time.monotonic() + 5
        while sum(sums.let_go() for sums in joined) < size:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def begin_on(
    sums: AbortableGloo, rank: int, shares: Sequence[float], tensor: Tensor, number: int
) -> tuple[Any, int, int]:
    """Start a sum on one rank; return its future, the number of its messages, and their bytes."""
    made: list[UnevenAllReduce] = []

    def make(gloo: object) -> UnevenAllReduce:
        made.append(UnevenAllReduce(gloo, rank, shares, tensor, number))
        return made[0]

    return sums.message(make, tensor, f"sum {number}"), made[0].num_tags, made[0].nbytes


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_sum_is_that_of_all_ranks_with_the_same_bits(shares: tuple[int, ...], dtype: torch.dtype) -> None:
    size = len(shares)
    with groups(size) as sums:
        for count in (1, 100, 2 * PIECE_BYTES // dtype.itemsize + 7, 6 * PIECE_BYTES // dtype.itemsize):
            addends = [(1000 * torch.randn(count, dtype=torch.float64)).to(dtype) for _ in shares]
            tensors = [addend.clone() for addend in addends]
            begun = [begin_on(sums[rank], rank, shares, tensors[rank], 7) for rank in range(size)]
            for future, _, _ in begun:
                future.wait()
            in_order = addends[0].clone()
            for addend in addends[1:]:
                in_order += addend
            assert torch.equal(tensors[0], in_order)  # no matter who owns them
            assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
            for rank, (_, _, nbytes) in enumerate(begun):
                promised = bytes_of_uneven_all_reduce(tensors[0].nbytes, size, shares[rank] / sum(shares))
                assert nbytes == pytest.approx(promised, abs=8 * size * dtype.itemsize)


def test_sums_that_overlap_do_not_mix() -> None:
    with groups(3) as sums:
        tensors = [[torch.full((400_000,), float(10**step * (rank + 1))) for rank in range(3)] for step in range(3)]
        futures, number = [], 0
        for row in tensors:
            begun = [begin_on(sums[rank], rank, (1, 0, 2), row[rank], number) for rank in range(3)]
            futures += [future for future, _, _ in begun]
            number += begun[0][1]
        for future in futures:
            future.wait()
        for step, row in enumerate(tensors):
            for tensor in row:
                assert bool((tensor == 6.0 * 10**step).all())


def test_sum_without_a_rank_can_be_left() -> None:
    with groups(3) as sums:
        tensors = [torch.ones(3 * PIECE_BYTES // 4) for _ in range(2)]
        futures = [begin_on(sums[rank], rank, (1, 1, 1), tensors[rank], 0)[0] for rank in range(2)]
        started = time.monotonic()
        for one in sums[:2]:
            one.abort(NodeLost("the third is gone"))
        for future in futures:
            with refused(NodeLost):
                future.wait()
        assert time.monotonic() - started < 1


def test_sums_stay_divided_while_every_line_is_known() -> None:
    group = Group(
        rank=0, size=4, device=torch.device("cpu"), nodes="abcd", timer=StepTimer(torch.device("cpu")), is_elastic=True
    )
    group.divide_sums({"a": 4e6, "b": 1e6, "c": 4e6, "d": 4e6})
    assert group.sum_shares == ()  # there is no process group
    with groups(4) as sums:
        check_choices(group, sums[0])


def check_choices(group: Group, sums: AbortableGloo) -> None:
    """Let the ranks of a group change."""
    group.become(0, "abcd", None, None, sums)
    shares = group.sum_shares
    assert (len(shares), min(shares)) == (4, shares[1])
    group.become(1, "abd", None, None, sums)
    assert len(group.sum_shares) == 3
    group.become(1, "abde", None, None, sums)
    assert group.sum_shares == ()
    group.become(0, "abcd", None, None, sums)
    assert group.sum_shares == shares
    group.divide_sums({})
    assert group.sum_shares == ()
