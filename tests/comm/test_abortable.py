"""A sum whose other rank does not come is left at once; what comes of it later changes nothing that is still used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.comm.abortable import AbortableSums
from evener.errors import NodeLost


@pytest.fixture
def pair() -> Iterator[list[AbortableSums]]:
    """Of two ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> AbortableSums:
        return AbortableSums(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)))

    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(join, range(2)))


def wait_until_let_go(sums: AbortableSums) -> None:
    """Within a moment."""
    deadline = time.monotonic() + 5
    while not sums.let_go():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_sum_is_in_the_tensor_and_in_the_future(pair: list[AbortableSums]) -> None:
    tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
    futures = [sums.all_reduce(tensor) for sums, tensor in zip(pair, tensors, strict=True)]
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait().tolist() == [3.0, 3.0, 3.0]
        assert tensor.tolist() == [3.0, 3.0, 3.0]
    for sums in pair:
        wait_until_let_go(sums)


def test_an_aborted_wait_ends_at_once_and_later_ones_do_not_begin(pair: list[AbortableSums]) -> None:
    left = torch.ones(4)
    future = pair[0].all_reduce(left)
    pair[0].abort(NodeLost("the other is gone"))
    with pytest.raises(NodeLost, match="the other is gone"):
        future.wait()
    with pytest.raises(NodeLost, match="the other is gone"):
        pair[0].all_reduce(torch.ones(4))
    assert not pair[0].let_go()  # the other may still write into it
    assert pair[1].all_reduce(torch.ones(4)).wait().tolist() == [2.0] * 4  # it was frozen, and knows nothing
    wait_until_let_go(pair[0])
    assert left.tolist() == [2.0] * 4  # so nobody may have used it for anything else
    with pytest.raises(NodeLost):
        future.wait()


def test_a_sum_that_fails_is_the_end_of_all(pair: list[AbortableSums]) -> None:
    future = pair[0].all_reduce(torch.ones(4))
    wait_until_let_go(pair[1])  # it leaves, as a process that ends
    with pytest.raises(RuntimeError):
        future.wait()
    assert pair[0].error is not None
    wait_until_let_go(pair[0])


class _Failing:
    """A process group with one sum under way, which fails when it is told to."""

    def __init__(self) -> None:
        self.under_way: Any = torch.futures.Future()

    def allreduce(self, _: list[torch.Tensor]) -> _Failing:
        return self

    def get_future(self) -> Any:
        return self.under_way


def test_whoever_wakes_up_by_a_failure_finds_that_there_will_be_no_further_sum() -> None:
    gloo, seen = _Failing(), []
    sums = AbortableSums(gloo)
    sums.all_reduce(torch.ones(1)).add_done_callback(lambda _: seen.append(sums.error))
    gloo.under_way.set_exception(RuntimeError("connection closed by peer"))
    assert [str(error) for error in seen] == ["connection closed by peer"]
