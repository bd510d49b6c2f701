"""One primitive moves shards: every needed index comes from its owner, sums go back, bytes are counted."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.comm.exchange import Exchange, Intervals, Region, Route, blocks, numel, shape_of
from evener.comm.group import Group
from evener.comm.mesh import MAX_ROUND_BYTES
from evener.records.errors import InvalidValue
from support.refusals import refused
from support.thread_ranks import together


def rows(*intervals: Intervals, columns: int = 3) -> tuple[Region, ...]:
    return tuple((own, ((0, columns),)) for own in intervals)


@st.composite
def partitions(draw: st.DrawFn, size: int, ranks: int) -> tuple[Intervals, ...]:
    """Every index of a dim to one rank, in stretches."""
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=size, max_size=size))
    return tuple(tuple((i, i + 1) for i in range(size) if owner[i] == rank) for rank in range(ranks))


@st.composite
def needs(draw: st.DrawFn, size: int, ranks: int) -> tuple[Intervals, ...]:
    """Any stretch for every rank, also none."""
    pairs = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for _ in range(ranks)]
    return tuple(((a, b),) if a < b else () for a, b in pairs)


@pytest.mark.parametrize("small", [True, False], ids=["mesh", "collective"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_exchange_gathers_needed_parts_and_sums_them_back(small: bool, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    columns = data.draw(needs(width, ranks))
    own = tuple((part, ((0, width),)) for part in data.draw(partitions(height, ranks)))
    need = tuple(zip(data.draw(needs(height, ranks)), columns, strict=True))
    whole = torch.arange(height * width, dtype=torch.float64).view(height, width) + 1

    def take(region: Region) -> torch.Tensor:
        lists = [[i for a, b in intervals for i in range(a, b)] for intervals in region]
        return whole[lists[0]][:, lists[1]]

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = Exchange(group, [Route(own, need)], "test")
        return exchange.all_gather([take(own[group.rank])])[0], exchange.reduce_scatter([take(need[group.rank])])[0]

    with mock.patch("evener.comm.exchange.MAX_ROUND_BYTES", MAX_ROUND_BYTES if small else -1):
        results = together(ranks, work)
    times = torch.zeros_like(whole)
    for rank in range(ranks):
        lists = [[i for a, b in intervals for i in range(a, b)] for intervals in need[rank]]
        times[torch.tensor(lists[0], dtype=torch.long)[:, None], torch.tensor(lists[1], dtype=torch.long)] += 1
    for rank, (needed, summed) in enumerate(results):
        torch.testing.assert_close(needed, take(need[rank]))
        lists = [[i for a, b in intervals for i in range(a, b)] for intervals in own[rank]]
        torch.testing.assert_close(summed, (whole * times)[lists[0]])


def test_bytes_are_counted_per_kind_in_both_directions() -> None:
    own, need = rows(((0, 4),), ((4, 6),)), rows(((0, 5),), ((3, 6),))

    def work(group: Group) -> tuple[float, float]:
        exchange = Exchange(group, [Route(own, need)], "halo")
        exchange.all_gather([torch.zeros(shape_of(own[group.rank]))])
        exchange.reduce_scatter([torch.zeros(shape_of(need[group.rank]))])
        assert group.traffic.seconds["halo"] > 0
        return group.traffic.sent["halo"], group.traffic.received["halo"]

    assert together(2, work) == [(24, 24), (24, 24)]


@pytest.mark.parametrize(("columns", "collectives"), [(10, 0), (20_000, 2)])
def test_large_tensors_use_a_collective_and_small_ones_the_mesh(columns: int, collectives: int) -> None:
    own = rows(((0, 1),), ((1, 2),), columns=columns)

    def work(group: Group) -> bool:
        x = torch.full((1, columns), float(group.rank))
        return torch.equal(Exchange(group, [Route(own, own[::-1])], "swap").all_gather([x])[0], 1 - x)

    with mock.patch("torch.distributed.all_to_all_single", wraps=dist.all_to_all_single) as collective:
        assert together(2, work) == [True, True]
    assert collective.call_count == collectives


def test_several_tensors_share_one_message() -> None:
    first, second = rows(((0, 1),), ((1, 3),)), rows(((0, 2),), ((2, 3),))

    def work(group: Group) -> list[torch.Tensor]:
        exchange = Exchange(group, [Route(first, second, 0), Route(second, first, 1), Route(first, first, 0)], "three")
        return exchange.all_gather(
            [torch.full(shape_of(own[group.rank]), float(group.rank)) for own in (first, second)]
        )

    zero, one = together(2, work)
    assert [x[:, 0].tolist() for x in zero] == [[0, 1], [0], [0]]
    assert [x[:, 0].tolist() for x in one] == [[1], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("own", "found"),
    [(rows(((0, 2),), ((3, 4),)), "got 9"), (rows(((0, 3),), ((2, 4),)), "got 15")],
    ids=["nobody's", "two ranks'"],
)
def test_every_needed_index_has_one_owner(own: tuple[Region, ...], found: str) -> None:
    def work(group: Group) -> None:
        Exchange(group, [Route(own, rows(((0, 4),), ((0, 4),)))], "wrong")

    with pytest.raises(InvalidValue, match=rf"owned elements that rank 0 needs must be 12, .*, {found}"):
        together(2, work)


def test_wrong_shape_or_type_is_rejected_before_sending() -> None:
    own = rows(((0, 2),), ((2, 4),))

    def work(group: Group) -> None:
        exchange = Exchange(group, [Route(own, own[::-1]), Route(own, own, 1)], "wrong")
        with pytest.raises(InvalidValue, match=rf"tensor 0 of rank {group.rank} .* of shape \(2, 3\), got \(3, 3\)"):
            exchange.all_gather([torch.zeros(3, 3), torch.zeros(2, 3)])
        with refused(InvalidValue):
            exchange.all_gather([torch.zeros(2, 3), torch.zeros(2, 3).double()])

    together(2, work)


def test_blocks_cover_the_intersection_of_two_regions() -> None:
    own: Region = (((0, 4), (8, 10)), ((2, 3),))
    need: Region = (((3, 9),), ((0, 5),))
    found = blocks(own, need)
    assert [numel(here) for here, _ in found] == [1, 1]
    assert [(here[0].start, there[0].start) for here, there in found] == [(3, 0), (4, 5)]
    assert [there[1] for _, there in found] == [slice(2, 3)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_every_dtype_is_exchanged(dtype: torch.dtype) -> None:
    own = rows(((0, 2),), ((2, 4),))

    def work(group: Group) -> torch.Tensor:
        return Exchange(group, [Route(own, own[::-1])], "swap").all_gather(
            [torch.full((2, 3), group.rank, dtype=dtype)]
        )[0]

    assert [x.float().mean().item() for x in together(2, work)] == [1, 0]


def test_single_number_is_exchanged_with_any_stride() -> None:
    own = rows(((0, 1),), (), columns=1)

    def work(group: Group) -> tuple[float, list[float]]:
        spread = torch.full((), 7.0, dtype=torch.float64).expand(1)  # as backward passes of sums and means make them
        held = spread.expand(1, 1)[: 1 - group.rank]
        needed = Exchange(group, [Route(own, own[::-1])], "swap").all_gather([held])[0]
        return float(needed.sum()), group.all_gather(spread, "statistics").flatten().tolist()

    assert together(2, work) == [(0, [7, 7]), (7, [7, 7])]
