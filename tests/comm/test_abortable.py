"""A sum whose other rank does not come is left at once; what comes of it later changes nothing that is still used."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.abortable_group import AbortableProcessGroup, forget_in_torch
from evener.records.errors import NodeLost
from support.refusals import refused
from support.stores import memory_store


@pytest.fixture
def pair() -> Iterator[list[AbortableGloo]]:
    """Of two ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> AbortableGloo:
        return AbortableGloo(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)))

    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(join, range(2)))


@pytest.fixture
def places() -> list[GlooPlace]:
    """Where two ranks meet."""
    store = memory_store()
    return [GlooPlace(store=store, rank=rank, size=2, longest_wait=30.0) for rank in range(2)]


def wait_until_let_go(sums: AbortableGloo) -> None:
    """Within a moment."""
    deadline = time.monotonic() + 5
    while not sums.let_go():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_reduce_fills_the_tensor_and_the_future(pair: list[AbortableGloo]) -> None:
    tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
    futures = [sums.all_reduce(tensor) for sums, tensor in zip(pair, tensors, strict=True)]
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait().tolist() == [3.0, 3.0, 3.0]
        assert tensor.tolist() == [3.0, 3.0, 3.0]
    for sums in pair:
        wait_until_let_go(sums)


def test_abort_ends_a_wait_at_once_and_blocks_later_sums(pair: list[AbortableGloo]) -> None:
    left = torch.ones(4)
    future = pair[0].all_reduce(left)
    pair[0].abort(NodeLost("the other is gone"))
    with refused(NodeLost):
        future.wait()
    with refused(NodeLost):
        pair[0].all_reduce(torch.ones(4))
    assert not pair[0].let_go()  # the other may still write into it
    assert pair[1].all_reduce(torch.ones(4)).wait().tolist() == [2.0] * 4  # it was frozen, and knows nothing
    wait_until_let_go(pair[0])
    assert left.tolist() == [2.0] * 4  # so nobody may have used it for anything else
    with pytest.raises(NodeLost):
        future.wait()


def test_failed_sum_ends_all_later_ones(pair: list[AbortableGloo]) -> None:
    future = pair[0].all_reduce(torch.ones(4))
    wait_until_let_go(pair[1])  # it leaves, as a process that ends
    with pytest.raises(RuntimeError):
        future.wait()
    assert pair[0].error is not None
    wait_until_let_go(pair[0])


def test_messages_arrive_in_order_and_abort_ends_a_missing_one(places: list[GlooPlace]) -> None:
    with ThreadPoolExecutor(2) as threads:
        pair = [AbortableGloo(gloo, at) for gloo, at in zip(threads.map(GlooPlace.join, places), places, strict=True)]
    groups = [AbortableProcessGroup(rank, 2, one) for rank, one in enumerate(pair)]
    taken = [torch.zeros(2), torch.zeros(2)]
    works = [groups[1].recv([tensor], 0, 7) for tensor in taken]
    for value in (1.0, 2.0):
        groups[0].send([torch.full((2,), value)], 1, 7).wait()
    assert [work.wait() for work in works] == [True, True]
    assert [tensor.tolist() for tensor in taken] == [[1.0, 1.0], [2.0, 2.0]]
    waiting = groups[1].recv([torch.zeros(2)], 0, 7)
    pair[1].abort(NodeLost("the other is gone"))
    with refused(NodeLost):
        waiting.wait()
    wait_until_let_go(pair[1])  # though the other sends nothing, and keeps its connection
    pair[0].abort(NodeLost("the group is over"))
    wait_until_let_go(pair[0])
    for group in groups:
        forget_in_torch(group)


@pytest.mark.parametrize("is_staged", [False, True])
def test_two_ranks_that_wait_for_messages_of_each_other_leave(places: list[GlooPlace], is_staged: bool) -> None:
    """Neighbours in a pipeline do this when a third rank is lost: neither posts what the other waits for."""
    places = [replace(place, is_staged=is_staged) for place in places]
    with ThreadPoolExecutor(2) as threads:
        pair = [AbortableGloo(gloo, at) for gloo, at in zip(threads.map(GlooPlace.join, places), places, strict=True)]
    groups = [AbortableProcessGroup(rank, 2, one) for rank, one in enumerate(pair)]
    waiting = [group.send([torch.ones(2)], 1 - rank, 7) for rank, group in enumerate(groups)]
    for one in pair:
        one.abort(NodeLost("a third one is gone"))
    for work in waiting:
        with refused(NodeLost):
            work.wait()
    for one in pair:
        wait_until_let_go(one)
    for group in groups:
        forget_in_torch(group)


@pytest.mark.parametrize("world_size", [None, 1])
def test_failed_operation_of_torch_raises_its_own_error(places: list[GlooPlace], world_size: int | None) -> None:
    if world_size is not None:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=world_size)
    with ThreadPoolExecutor(2) as threads:
        gloos = list(threads.map(GlooPlace.join, places))
    groups = [AbortableProcessGroup(at.rank, 2, AbortableGloo(one, at)) for one, at in zip(gloos, places, strict=True)]
    try:
        for group in groups:
            group.operations.abort(NodeLost("the other is gone"))
            with refused(NodeLost):
                dist.all_reduce(torch.ones(2), group=group)
    finally:
        for group in groups:
            forget_in_torch(group)
            wait_until_let_go(group.operations)
        if world_size is not None:
            dist.destroy_process_group()


def test_subgroup_ends_with_its_parent_group(places: list[GlooPlace]) -> None:
    def join(place: GlooPlace) -> tuple[AbortableGloo, AbortableGloo]:
        whole = AbortableGloo(place.join(), place)
        return whole, whole.among([1, 0])

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(join, places))
        sums = list(threads.map(lambda one: one[1].all_reduce(torch.ones(1)).wait(), both))
    assert [one.tolist() for one in sums] == [[2.0], [2.0]]
    for whole, part in both:
        whole.abort(NodeLost("over"))
        assert isinstance(part.error, NodeLost)
        wait_until_let_go(whole)


class _Failing:
    """A process group with one sum under way, which fails when it is told to."""

    def __init__(self) -> None:
        self.under_way: Any = torch.futures.Future()

    def allreduce(self, _: list[torch.Tensor]) -> _Failing:
        return self

    def get_future(self) -> Any:
        return self.under_way


def test_callback_of_a_failed_sum_sees_the_error() -> None:
    gloo, seen = _Failing(), []
    sums = AbortableGloo(gloo)
    sums.all_reduce(torch.ones(1)).add_done_callback(lambda _: seen.append(sums.error))
    gloo.under_way.set_exception(RuntimeError("connection closed by peer"))
    assert [str(error) for error in seen] == ["connection closed by peer"]


def test_failure_to_begin_ends_the_group_too(places: list[GlooPlace]) -> None:
    """A message to a rank whose connection is closed already fails where it is begun."""
    with ThreadPoolExecutor(2) as threads:
        pair = list(threads.map(lambda place: AbortableGloo(place.join(), place), places))
        parts = list(threads.map(lambda sums: sums.among([0, 1]), pair))

    def start(gloo: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        parts[0].begin(start, torch.ones(1))
    assert parts[0].error is not None
    assert pair[0].has_failed
    assert not pair[1].has_failed
    for sums in pair:
        sums.abort(NodeLost("the test is over"))
        wait_until_let_go(sums)


def test_message_that_has_arrived_does_not_keep_the_group(places: list[GlooPlace]) -> None:
    """Its thread has not seen it yet when the group is let go."""
    with ThreadPoolExecutor(2) as threads:
        pair = [AbortableGloo(gloo, at) for gloo, at in zip(threads.map(GlooPlace.join, places), places, strict=True)]
    may_wait, taken = threading.Event(), torch.zeros(1)

    class Late:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            may_wait.wait()
            self._work.wait()

    pair[1].message(lambda gloo: Late(gloo.recv([taken], 0, 7)), taken, "lane")
    sent = torch.ones(1)
    pair[0].message(lambda gloo: gloo.send([sent], 1, 7), sent, "lane").wait()
    pair[1].abort(NodeLost("a third one is gone"))
    assert not pair[1].let_go()
    may_wait.set()
    wait_until_let_go(pair[1])
    pair[0].abort(NodeLost("the group is over"))
    wait_until_let_go(pair[0])


def test_error_of_any_kind_ends_a_message(places: list[GlooPlace]) -> None:
    with ThreadPoolExecutor(2) as threads:
        pair = [AbortableGloo(gloo, at) for gloo, at in zip(threads.map(GlooPlace.join, places), places, strict=True)]

    class Failed:
        def wait(self) -> None:
            raise TypeError("of a tensor that cannot be sent")

    future = pair[0].message(lambda _: Failed(), torch.ones(1), "lane")
    with pytest.raises(TypeError):
        future.wait()
    for one in pair:
        one.abort(NodeLost("over"))
        wait_until_let_go(one)
