"""A user's loader, divided: every sample once, by whatever sampler, collate function and workers he has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.data.sampler import Division
from evener.frontends.programs.batch_parts import BatchPart, part_of
from evener.frontends.programs.divided_loader import DividedLoader
from evener.oracle.apportion import weights_to_workers
from evener.records.errors import InvalidInput
from support.refusals import refused
from support.thread_ranks import together


def numbers(count: int) -> Any:
    """A data set of the numbers from 0 on."""
    return range(count)


def alone() -> Group:
    cpu = torch.device("cpu")
    return Group(rank=0, size=1, device=cpu, nodes=["n"], timer=StepTimer(cpu))


class Shares:
    """A run that divides by fixed shares."""

    def __init__(self, group: Group, shares: Sequence[float], trains: bool) -> None:
        self.group, self._trains = group, trains
        self._division = Division(weights_to_workers(shares, [None] * len(shares)))

    draws_alike = loads_alike = False
    limit = None
    moves = False

    def part_of(self, count: int, is_training: bool) -> BatchPart:
        if is_training or count < self.group.size:
            return part_of(self.group.rank, self._division.sizes(1, count))
        return part_of(self.group.rank, [n + 1 for n in self._division.sizes(1, count - self.group.size)])

    def is_training(self) -> bool:
        return self._trains

    def is_in_thread(self) -> bool:
        return False

    def begin(self, loader: DividedLoader) -> int | None:
        return None

    def loading(self, owner: object) -> None:
        pass

    def loaded(self, loader: DividedLoader, part: BatchPart, batch: Any) -> Any:
        return part, batch

    def moves_statistics(self) -> bool:
        return self.moves

    def end(self, loader: DividedLoader, is_over: bool) -> None:
        pass


def epochs(
    make: Callable[[], DataLoader[Any]], shares: Sequence[float], trains: bool = True, number: int = 1
) -> list[list[list[Any]]]:
    """By epoch and batch, the samples that count, in the order of ranks."""

    def work(group: Group) -> list[list[list[Any]]]:
        loader = DividedLoader(make(), Shares(group, shares, trains), "samples")
        assert len(loader) == len(make())
        return [[list(batch[: part.samples]) for part, batch in loader] for _ in range(number)]

    ranks = together(len(shares), work)
    return [
        [[one for rank in ranks for one in rank[epoch][i]] for i in range(len(ranks[0][epoch]))]
        for epoch in range(number)
    ]


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("shares", [[1], [2, 1], [5, 2, 0]])
def test_divided_batches_equal_those_of_one_process_in_order(shares: list[float]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(numbers(23), batch_size=5, collate_fn=as_it_is)

    assert epochs(make, shares, number=2) == [[list(batch) for batch in make()]] * 2


def test_leader_sampler_decides_even_with_its_own_generator() -> None:
    def make() -> DataLoader[Any]:
        sampler = RandomSampler(numbers(20), generator=torch.Generator().manual_seed(7))
        return DataLoader(numbers(20), sampler=sampler, batch_size=6, collate_fn=as_it_is)

    expected = make()
    assert epochs(make, [3, 1], number=2) == [[list(batch) for batch in expected] for _ in range(2)]


class OfWords:
    """Batches of tuples, of different sizes."""

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        yield [("a", 1), ("b", 2), ("c", 3)]
        yield [("d", 4)]

    def __len__(self) -> int:
        return 2


class Words:
    def __getitem__(self, key: tuple[str, int]) -> str:
        return key[0] * key[1]


def test_batch_samplers_with_any_size_or_index_type_are_divided() -> None:
    words: Any = Words()
    batches: Any = OfWords()

    def make() -> DataLoader[Any]:
        return DataLoader(words, batch_sampler=batches, collate_fn=as_it_is)

    assert epochs(make, [2, 1]) == [[["a", "bb", "ccc"], ["dddd"]]]


def test_evaluation_leaves_no_rank_without_samples() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(numbers(10), batch_size=3, collate_fn=as_it_is)

    assert epochs(make, [9, 1, 1], trains=False) == [[[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]]
    with refused(InvalidInput):
        epochs(lambda: DataLoader(numbers(2), batch_size=3), [1, 1, 1], trains=False)


def test_batches_that_move_norm_statistics_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "moves", True)
    assert epochs(lambda: DataLoader(numbers(7), batch_size=3, collate_fn=as_it_is), [9, 1, 1], trains=False) == [
        [[0, 1, 2], [3, 4, 5], [6]]
    ]


class Stream(IterableDataset[int]):
    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self._first, self._first + 7))


def test_all_ranks_read_the_same_stream_and_use_their_part() -> None:
    def make(first: int = 0) -> DataLoader[Any]:
        return DataLoader(Stream(first), batch_size=3, collate_fn=lambda some: [int(one) for one in some])

    def work(group: Group) -> list[list[int]]:
        return [batch[: p.samples] for p, batch in DividedLoader(make(), Shares(group, [2, 1], True), "samples")]

    assert together(2, work) == [[[0, 1], [3, 4], [6]], [[2], [5], []]]

    def differently(group: Group) -> list[Any]:
        return list(DividedLoader(make(group.rank), Shares(group, [2, 1], True), "samples"))

    with refused(InvalidInput):
        together(2, differently)


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (DataLoader(numbers(4), sampler=DistributedSampler(numbers(4), 2, 0)), "leave the DistributedSampler out"),
        (DataLoader(numbers(4), batch_size=None), "or give every batch to run.share"),
    ],
)
def test_indivisible_loaders_are_refused(loader: DataLoader[Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        DividedLoader(loader, Shares(alone(), [1], True), "samples")


def test_divided_loader_preserves_workers_and_batch_sampler() -> None:
    sampler = BatchSampler(SequentialSampler(range(9)), 4, drop_last=True)
    made: DataLoader[Any] = DataLoader(numbers(9), batch_sampler=sampler, collate_fn=as_it_is, num_workers=2)
    group = alone()
    loader = DividedLoader(made, Shares(group, [1], True), "samples")
    assert [batch for _, batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.num_workers == 2
