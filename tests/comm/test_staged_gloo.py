"""Collectives of tensors in main memory and on accelerators: the results of Gloo, without a wait in the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.abortable import AbortableGloo, GlooPlace
from evener.comm.abortable_group import AbortableProcessGroup, forget_in_torch
from evener.records.errors import NodeLost
from support import standin
from support.accelerator import DEVICE, NEEDS_DEVICE
from support.stores import memory_store


def on_standin(test: Callable[..., None]) -> Any:
    """The test needs the controls of the stand-in."""
    is_there = DEVICE.startswith("standin")
    return pytest.mark.cuda(pytest.mark.skipif(not is_there, reason="needs the controls of the stand-in")(test))


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=NEEDS_DEVICE)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the tensors."""
    return torch.device(request.param)


@pytest.fixture
def groups() -> Iterator[list[AbortableProcessGroup]]:
    """Return the groups of two ranks, and end them afterwards."""
    store = memory_store()
    places = [GlooPlace(store=store, rank=rank, size=2, longest_wait=30.0, is_staged=True) for rank in range(2)]

    def join(place: GlooPlace) -> AbortableProcessGroup:
        return AbortableProcessGroup(place.rank, 2, AbortableGloo(place.join(), place))

    made = on_both(places, join)
    yield made
    for group in made:
        group.operations.abort(NodeLost("the test is over"))
        forget_in_torch(group)
    deadline = time.monotonic() + 5
    while not all(group.operations.let_go() for group in made):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def on_both(each: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """The results for both ranks, which work at once."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, each))


def numbers(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def test_results_equal_those_of_gloo(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    def work(group: AbortableProcessGroup) -> list[Any]:
        rank = group.rank()
        total, chosen = numbers(device, 1.0 + rank, 2.0), numbers(device, float(rank))
        rows, options = [numbers(device, 0.0), numbers(device, 0.0)], dist.BroadcastOptions()
        options.rootRank = 1
        begun = [
            group.allreduce([total]),
            group.broadcast([chosen], options),
            group.allgather([rows], [numbers(device, 5.0 + rank)]),
        ]
        for one in begun:
            one.wait()
        return [total.tolist(), chosen.tolist(), [float(row) for row in rows]]

    assert on_both(groups, work) == [[[3.0, 4.0], [1.0], [5.0, 6.0]]] * 2


def test_tensors_of_inference_mode_are_exchanged(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    """PyTorch changes such tensors in that mode only, which belongs to a thread; YOLO validates in it."""

    @torch.inference_mode()
    def work(group: AbortableProcessGroup) -> list[Any]:
        total, rows = numbers(device, 1.0 + group.rank()), [numbers(device, 0.0), numbers(device, 0.0)]
        message, peer = numbers(device, float(group.rank())), 1 - group.rank()
        sent = group.send([message], peer, 7) if group.rank() else group.recv([message], peer, 7)
        begun = [group.allreduce([total]), group.allgather([rows], [numbers(device, 5.0 + group.rank())]), sent]
        for one in begun:
            one.wait()
        return [total.tolist(), [float(row) for row in rows], float(message)]

    assert on_both(groups, work) == [[[3.0], [5.0, 6.0], 1.0]] * 2


def test_uneven_blocks_and_empty_ones_arrive(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    """Rank 0 keeps one number and sends two, rank 1 sends none and keeps none."""

    def work(group: AbortableProcessGroup) -> list[float]:
        sent, received = [([1, 2], [1, 0]), ([0, 0], [2, 0])][group.rank()]
        source, target = numbers(device, *range(sum(sent))), numbers(device, *[-1.0] * sum(received))
        group.alltoall_base(target, source, received, sent).wait()
        values: list[float] = target.tolist()
        return values

    assert on_both(groups, work) == [[0.0], [1.0, 2.0]]


def test_messages_of_both_places_arrive_in_order(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    def work(group: AbortableProcessGroup) -> list[float]:
        peer, tensors = 1 - group.rank(), [numbers(on, 0.0) for on in (device, torch.device("cpu"), device)]
        if group.rank() == 0:
            tensors = [tensor.add_(number) for number, tensor in enumerate(tensors)]
        begun = [(group.recv if group.rank() else group.send)([tensor], peer, 7) for tensor in tensors]
        for one in begun:
            one.wait()
        return [float(tensor) for tensor in tensors]

    assert on_both(groups, work) == [[0.0, 1.0, 2.0]] * 2


def test_error_of_an_operation_reaches_the_caller(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    with pytest.raises(RuntimeError):
        groups[0].allreduce([torch.ones(1, dtype=torch.int16, device=device)]).wait()  # Gloo does not sum these
    assert groups[0].operations.has_failed


def test_abort_ends_a_wait_for_an_absent_rank(groups: list[AbortableProcessGroup], device: torch.device) -> None:
    lone = groups[0].allreduce([numbers(device, 1.0)])
    groups[0].operations.abort(NodeLost("node-1 is lost"))
    with pytest.raises(NodeLost):
        lone.wait()
    groups[1].allreduce([numbers(device, 1.0)]).wait()  # as if it had come late


@on_standin
def test_caller_never_waits_for_its_device(groups: list[AbortableProcessGroup]) -> None:
    controls, device = standin.load(), torch.device(DEVICE)

    def work(group: AbortableProcessGroup) -> int:
        tensors = [torch.ones(1000, device=device) for _ in range(5)]
        before = controls.waits_of_thread()
        begun = [group.allreduce([tensor]) for tensor in tensors]
        for one in begun:
            one.wait()
        waits: int = controls.waits_of_thread() - before
        assert all(float(tensor[0]) == 2.0 for tensor in tensors)
        return waits

    assert on_both(groups, work) == [0, 0]


@on_standin
def test_error_of_a_lost_device_reaches_the_caller(groups: list[AbortableProcessGroup]) -> None:
    controls, tensor = standin.load(), torch.ones(10, device="standin:1")
    controls.lose(1, True)
    try:
        with pytest.raises(RuntimeError, match="is lost"):
            groups[0].allreduce([tensor]).wait()
    finally:
        controls.lose(1, False)


@on_standin
def test_abort_ends_a_wait_for_a_hanging_device(groups: list[AbortableProcessGroup]) -> None:
    controls, tensor = standin.load(), torch.ones(10, device="standin:1")
    controls.hang(1, True)
    try:
        begun = groups[0].allreduce([tensor])
        groups[0].operations.abort(NodeLost("the device hangs"))
        with pytest.raises(NodeLost):
            begun.wait()
    finally:
        controls.hang(1, False)
    groups[1].allreduce([torch.ones(10)]).wait()
