"""The exchange of shards: from the regions that ranks own to the regions that they need.

    exchange = Exchange(group, [Route(owned, need)], "halo")
    needed = exchange.all_gather([x])              # every rank gets its needed region
    sums = exchange.reduce_scatter([d_needed])     # the transpose: every owner gets the sum of what was made of it

A region is a product of intervals, some for every dim. The tensor that a rank holds is the concatenation of its
intervals along each dim: the region ((0, 4),), ((2, 5), (8, 9)) of a matrix is a tensor of shape (4, 4) whose last
column is column 8 of the whole.

A halo needs the window around a rank's rows, a gather needs everything, a re-partition needs the next layer's division;
a reduce-scatter is the transpose of a gather. All ranks know all regions, so they exchange no sizes. Small messages
travel over the mesh of sockets, because Gloo's collectives take ten times as long to start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group, bytes_of
from evener.comm.mesh import MAX_ROUND_BYTES
from evener.records.errors import require

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]
Region: TypeAlias = tuple[Intervals, ...]
Place: TypeAlias = tuple[slice, ...]
"""The position of a block in a rank's tensor: a slice for every dim."""


@dataclass(frozen=True)
class Route:
    """The regions of one tensor and of one result.

    Attributes:
        owned: every rank's region of the tensor; each index has one owner at most.
        need: every rank's region of the result; regions of several ranks may overlap.
        source: index of the tensor in the exchange.
    """

    owned: tuple[Region, ...]
    need: tuple[Region, ...]
    source: int = 0


class Exchange:
    """An exchange of tensors along routes, in one message to each peer, in both directions.

    Args:
        group: the ranks.
        routes: what goes where.
        kind: label of the counted bytes and seconds.

    Raises:
        InvalidValue: a needed index has no owner, or two.
    """

    def __init__(self, group: Group, routes: Sequence[Route], kind: str) -> None:
        self.group, self.kind = group, kind
        self._routes = tuple(routes)
        for route in self._routes:
            _check(route, group.size)
        ranks = range(group.size)
        links = {(a, b): self._blocks(a, b) for a in ranks for b in ranks}
        elements = {link: sum(numel(block.owned) for block in parts) for link, parts in links.items()}
        self._gives = [links[group.rank, peer] for peer in ranks]
        self._takes = [links[peer, group.rank] for peer in ranks]
        self._largest = max((n for (a, b), n in elements.items() if a != b), default=0)

    @property
    def moves_nothing(self) -> bool:
        """Whether no rank needs anything from another."""
        return self._largest == 0

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the needed regions from the owned ones: one result for every route."""
        return self.begin_all_gather(tensors)()

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the owned regions, summed over the ranks, from tensors of the needed regions."""
        finish = self.begin_reduce_scatter(tensors)
        owned = {route.source: route.owned[self.group.rank] for route in self._routes}
        return finish([tensors[0].new_zeros(shape_of(owned[source])) for source in sorted(owned)])

    def own_part(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's owned region from `x`, the result of the only route."""
        part = x.new_empty(shape_of(self._routes[0].owned[self.group.rank]))
        for block in self._gives[self.group.rank]:
            part[block.owned] = x[block.needed]
        return part

    def begin_all_gather(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start `all_gather`; return a function that waits for it."""
        self._validate(tensors, {route.source: route.owned for route in self._routes})
        send = [[tensors[b.source][b.owned] for b in to_peer] for to_peer in self._gives]
        arrive = self._depart(send, [[numel(b.needed) for b in from_peer] for from_peer in self._takes], tensors[0])

        def finish() -> list[Tensor]:
            results = [tensors[r.source].new_empty(shape_of(r.need[self.group.rank])) for r in self._routes]
            for from_peer, parts in zip(self._takes, arrive(), strict=True):
                for block, part in zip(from_peer, parts, strict=True):
                    place = results[block.result][block.needed]
                    place.copy_(part.view(place.shape))
            return results

        return finish

    def begin_reduce_scatter(self, tensors: Sequence[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        """Start `reduce_scatter`; return a function that waits for it and adds to tensors of the owned regions."""
        if not self._routes:
            return lambda sums: sums
        self._validate(tensors, {i: route.need for i, route in enumerate(self._routes)})
        send = [[tensors[b.result][b.needed] for b in from_peer] for from_peer in self._takes]
        arrive = self._depart(send, [[numel(b.owned) for b in to_peer] for to_peer in self._gives], tensors[0])

        def finish(sums: list[Tensor]) -> list[Tensor]:
            for to_peer, parts in zip(self._gives, arrive(), strict=True):
                for block, part in zip(to_peer, parts, strict=True):
                    place = sums[block.source][block.owned]
                    place.add_(part.view(place.shape))
            return sums

        return finish

    def _blocks(self, owner: int, needer: int) -> list[_Block]:
        return [
            _Block(route.source, owned, i, needed)
            for i, route in enumerate(self._routes)
            for owned, needed in blocks(route.owned[owner], route.need[needer])
        ]

    def _validate(self, tensors: Sequence[Tensor], regions: dict[int, tuple[Region, ...]]) -> None:
        """Refuse wrong sizes here, because they would abort the process inside Gloo on another rank."""
        for i, by_rank in regions.items():
            expected = shape_of(by_rank[self.group.rank])
            what = f"tensor {i} of rank {self.group.rank} in an exchange"
            require(tuple(tensors[i].shape) == expected, what, tuple(tensors[i].shape), f"of shape {expected}")
            require(tensors[i].dtype == tensors[0].dtype, what, tensors[i].dtype, f"of type {tensors[0].dtype}")

    def _depart(
        self, send: list[list[Tensor]], expected: list[list[int]], like: Tensor
    ) -> Callable[[], list[list[Tensor]]]:
        """Send blocks to every peer; return a function that waits for theirs, of the `expected` sizes."""
        rank, group = self.group.rank, self.group
        local = send[rank]
        if self.moves_nothing:
            return lambda: [local if peer == rank else [] for peer in range(group.size)]
        send[rank], expected[rank] = [], []
        sent = sum(block.nbytes for to_peer in send for block in to_peer)
        group.traffic.count(self.kind, sent, sum(map(sum, expected)) * like.element_size())
        group.timer.break_for_others()
        small = group.prefers_mesh and self._largest * like.element_size() <= MAX_ROUND_BYTES
        receive = (_by_mesh if small else _by_collective)(group, send, list(map(sum, expected)), like)

        def arrive() -> list[list[Tensor]]:
            with group.waiting(self.kind):
                parts = receive()
            pairs = zip(parts, expected, strict=True)
            blocks = [list(torch.split(part, sizes)) if sizes else [] for part, sizes in pairs]
            blocks[rank] = local
            return blocks

        return arrive


@dataclass(frozen=True)
class _Block:
    """A block of an exchange, from `owned` of tensor `source` to `needed` of result `result`."""

    source: int
    owned: Place
    result: int
    needed: Place


def _check(route: Route, size: int) -> None:
    require(len(route.owned) == len(route.need) == size, "regions of a route", len(route.owned), f"one a rank ({size})")
    for rank, need in enumerate(route.need):
        owned = sum(numel(block) for region in route.owned for block, _ in blocks(region, need))
        wanted = prod(shape_of(need))
        require(owned == wanted, f"owned elements that rank {rank} needs", owned, f"{wanted}, each owned by one rank")


def _flat(tensors: list[Tensor], like: Tensor) -> Tensor:
    if not tensors:
        return like.new_empty(0)
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([block.reshape(-1) for block in tensors])


def _by_collective(
    group: Group, send: list[list[Tensor]], expected: list[int], like: Tensor
) -> Callable[[], list[Tensor]]:
    source = _flat([block for to_peer in send for block in to_peer], like).contiguous()
    target = like.new_empty(sum(expected))
    outgoing = [sum(block.numel() for block in to_peer) for to_peer in send]
    work = dist.all_to_all_single(target, source, expected, outgoing, group=group.process_group, async_op=True)
    assert work is not None

    def receive(_source: Tensor = source) -> list[Tensor]:  # `source` has to live until it is sent
        work.wait()
        return list(torch.split(target, expected))

    return receive


def _by_mesh(group: Group, send: list[list[Tensor]], expected: list[int], like: Tensor) -> Callable[[], list[Tensor]]:
    mesh = group.mesh
    assert mesh is not None
    for peer, to_peer in enumerate(send):
        if to_peer:
            mesh.send_to(peer, bytes_of(_flat(to_peer, like)))

    def receive() -> list[Tensor]:
        messages = [mesh.receive_from(peer) if size else b"" for peer, size in enumerate(expected)]
        return [
            torch.frombuffer(bytearray(message), dtype=like.dtype).to(like.device) if message else like.new_empty(0)
            for message in messages
        ]

    return receive


def size_of(intervals: Intervals) -> int:
    """Return the number of indices in disjoint `intervals`."""
    return sum(end - start for start, end in intervals)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of the tensor that holds `region`."""
    return tuple(size_of(intervals) for intervals in region)


def blocks(owned: Region, need: Region) -> list[tuple[Place, Place]]:
    """Return the intersection as blocks: (place in the tensor of `owned`, place in the tensor of `need`)."""
    stretches = [_stretches(a, b) for a, b in zip(owned, need, strict=True)]
    return [(tuple(s[0] for s in block), tuple(s[1] for s in block)) for block in product(*stretches)]


def numel(place: Place) -> int:
    """Return the number of elements at `place`."""
    return prod(part.stop - part.start for part in place)


def _stretches(owned: Intervals, need: Intervals) -> list[tuple[slice, slice]]:
    """Return the intersection along one dim as slices, each relative to the begin of its tensor."""
    stretches = []
    before_owned = 0
    for start, end in owned:
        before_need = 0
        for first, last in need:
            low, high = max(start, first), min(end, last)
            if low < high:
                here, there = before_owned - start, before_need - first
                stretches.append((slice(low + here, high + here), slice(low + there, high + there)))
            before_need += last - first
        before_owned += end - start
    return stretches
