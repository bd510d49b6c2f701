"""One primitive moves shards: from the regions that ranks own to the regions that they need.

    exchange = Exchange(group, [Route(own, need)], "halo")
    needed = exchange.all_gather([x])              # every rank gets its needed region
    sums = exchange.reduce_scatter([d_needed])     # the transpose: every owner gets the sum of what was made of it

A region is a product of intervals, some for every dim. The tensor that a rank holds is the concatenation of its
intervals along each dim: the region ((0, 4),), ((2, 5), (8, 9)) of a matrix is a tensor of shape (4, 4) whose last
column is column 8 of the whole.

A halo needs the window around the own rows, a gather needs everything, a re-partition needs the next layer's division;
a reduce-scatter is the transpose of a gather. All ranks know all regions, so nobody has to be asked for sizes. What is
small travels over the mesh of sockets, where Gloo's collectives would take ten times as long to start.
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
from evener.comm.mesh import LARGEST_ROUND
from evener.records.errors import require

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]
Region: TypeAlias = tuple[Intervals, ...]
Place: TypeAlias = tuple[slice, ...]
"""Where in a rank's own tensor something lies: a slice for every dim."""


@dataclass(frozen=True)
class Route:
    """From one tensor to one other.

    Attributes:
        own: every rank's region of the tensor; each index has one owner at most.
        need: every rank's region of the result; regions of several ranks may overlap.
        source: index of the tensor among those given.
    """

    own: tuple[Region, ...]
    need: tuple[Region, ...]
    source: int = 0


class Exchange:
    """Moves tensors along some routes in one message to each peer; in both directions.

    Args:
        group: the ranks.
        routes: what goes where.
        kind: under which the bytes and seconds are counted.

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
        elements = {link: sum(numel(block.owned) for block in found) for link, found in links.items()}
        self._gives = [links[group.rank, peer] for peer in ranks]
        self._takes = [links[peer, group.rank] for peer in ranks]
        self._largest = max((n for (a, b), n in elements.items() if a != b), default=0)

    @property
    def moves_nothing(self) -> bool:
        """Whether no rank needs anything from another."""
        return self._largest == 0

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The needed regions, from the owned ones: one result for every route."""
        return self.begin_all_gather(tensors)()

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The owned regions, each the sum of what the ranks have for it, from tensors of the needed regions."""
        finish = self.begin_reduce_scatter(tensors)
        own = {route.source: route.own[self.group.rank] for route in self._routes}
        return finish([tensors[0].new_zeros(shape_of(own[source])) for source in sorted(own)])

    def own_part(self, x: Tensor) -> Tensor:
        """This rank's owned region, copied from `x`, a tensor of what its only route brings."""
        own = x.new_empty(shape_of(self._routes[0].own[self.group.rank]))
        for block in self._gives[self.group.rank]:
            own[block.owned] = x[block.needed]
        return own

    def begin_all_gather(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start a `all_gather`; the function that is returned waits for it."""
        self._validate(tensors, {route.source: route.own for route in self._routes})
        send = [[tensors[b.source][b.owned] for b in found] for found in self._gives]
        arrive = self._depart(send, [[numel(b.needed) for b in found] for found in self._takes], tensors[0])

        def finish() -> list[Tensor]:
            results = [tensors[r.source].new_empty(shape_of(r.need[self.group.rank])) for r in self._routes]
            for found, parts in zip(self._takes, arrive(), strict=True):
                for block, part in zip(found, parts, strict=True):
                    place = results[block.result][block.needed]
                    place.copy_(part.view(place.shape))
            return results

        return finish

    def begin_reduce_scatter(self, tensors: Sequence[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        """Start a `reduce_scatter`; what is returned waits for it and adds to tensors of the owned regions."""
        if not self._routes:
            return lambda sums: sums
        self._validate(tensors, {i: route.need for i, route in enumerate(self._routes)})
        send = [[tensors[b.result][b.needed] for b in found] for found in self._takes]
        arrive = self._depart(send, [[numel(b.owned) for b in found] for found in self._gives], tensors[0])

        def finish(sums: list[Tensor]) -> list[Tensor]:
            for found, parts in zip(self._gives, arrive(), strict=True):
                for block, part in zip(found, parts, strict=True):
                    place = sums[block.source][block.owned]
                    place.add_(part.view(place.shape))
            return sums

        return finish

    def _blocks(self, owner: int, needer: int) -> list[_Block]:
        return [
            _Block(route.source, owned, i, needed)
            for i, route in enumerate(self._routes)
            for owned, needed in blocks(route.own[owner], route.need[needer])
        ]

    def _validate(self, tensors: Sequence[Tensor], regions: dict[int, tuple[Region, ...]]) -> None:
        """A wrong size would abort the process inside Gloo, on another rank: refuse it here."""
        for i, by_rank in regions.items():
            expected = shape_of(by_rank[self.group.rank])
            what = f"tensor {i} of rank {self.group.rank} in an exchange"
            require(tuple(tensors[i].shape) == expected, what, tuple(tensors[i].shape), f"of shape {expected}")
            require(tensors[i].dtype == tensors[0].dtype, what, tensors[i].dtype, f"of type {tensors[0].dtype}")

    def _depart(
        self, send: list[list[Tensor]], expected: list[list[int]], like: Tensor
    ) -> Callable[[], list[list[Tensor]]]:
        """Send blocks to every peer; the function returned waits for theirs, of the `expected` sizes, and own ones."""
        rank, group = self.group.rank, self.group
        own = send[rank]
        if self.moves_nothing:
            return lambda: [own if peer == rank else [] for peer in range(group.size)]
        send[rank], expected[rank] = [], []
        sent = sum(block.nbytes for found in send for block in found)
        group.traffic.count(self.kind, sent, sum(map(sum, expected)) * like.element_size())
        group.timer.break_for_others()
        small = group.prefers_mesh and self._largest * like.element_size() <= LARGEST_ROUND
        receive = (_by_mesh if small else _by_collective)(group, send, list(map(sum, expected)), like)

        def arrive() -> list[list[Tensor]]:
            with group.waiting(self.kind):
                parts = receive()
            pairs = zip(parts, expected, strict=True)
            blocks = [list(torch.split(part, sizes)) if sizes else [] for part, sizes in pairs]
            blocks[rank] = own
            return blocks

        return arrive


@dataclass(frozen=True)
class _Block:
    """A block on its way: place `owned` of tensor `source` is place `needed` of result `result`."""

    source: int
    owned: Place
    result: int
    needed: Place


def _check(route: Route, size: int) -> None:
    require(len(route.own) == len(route.need) == size, "regions of a route", len(route.own), f"one a rank ({size})")
    for rank, need in enumerate(route.need):
        found = sum(numel(block) for own in route.own for block, _ in blocks(own, need))
        wanted = prod(shape_of(need))
        require(found == wanted, f"owned elements that rank {rank} needs", found, f"{wanted}, each owned by one rank")


def _flat(found: list[Tensor], like: Tensor) -> Tensor:
    if not found:
        return like.new_empty(0)
    return found[0].reshape(-1) if len(found) == 1 else torch.cat([block.reshape(-1) for block in found])


def _by_collective(
    group: Group, send: list[list[Tensor]], expected: list[int], like: Tensor
) -> Callable[[], list[Tensor]]:
    source = _flat([block for found in send for block in found], like).contiguous()
    target = like.new_empty(sum(expected))
    outgoing = [sum(block.numel() for block in found) for found in send]
    work = dist.all_to_all_single(target, source, expected, outgoing, group=group.process_group, async_op=True)
    assert work is not None

    def receive(_source: Tensor = source) -> list[Tensor]:  # which has to live until all of it is sent
        work.wait()
        return list(torch.split(target, expected))

    return receive


def _by_mesh(group: Group, send: list[list[Tensor]], expected: list[int], like: Tensor) -> Callable[[], list[Tensor]]:
    mesh = group.mesh
    assert mesh is not None
    for peer, found in enumerate(send):
        if found:
            mesh.send_to(peer, bytes_of(_flat(found, like)))

    def receive() -> list[Tensor]:
        messages = [mesh.receive_from(peer) if size else b"" for peer, size in enumerate(expected)]
        return [
            torch.frombuffer(bytearray(message), dtype=like.dtype).to(like.device) if message else like.new_empty(0)
            for message in messages
        ]

    return receive


def size_of(intervals: Intervals) -> int:
    """Number of indices in disjoint `intervals`."""
    return sum(end - start for start, end in intervals)


def shape_of(region: Region) -> tuple[int, ...]:
    """Shape of the tensor that holds `region`."""
    return tuple(size_of(intervals) for intervals in region)


def blocks(own: Region, need: Region) -> list[tuple[Place, Place]]:
    """What `own` has of `need`, as blocks: (place in the tensor of `own`, place in the tensor of `need`)."""
    stretches = [_stretches(a, b) for a, b in zip(own, need, strict=True)]
    return [(tuple(s[0] for s in block), tuple(s[1] for s in block)) for block in product(*stretches)]


def numel(place: Place) -> int:
    """Number of elements at `place`."""
    return prod(part.stop - part.start for part in place)


def _stretches(own: Intervals, need: Intervals) -> list[tuple[slice, slice]]:
    """What `own` has of `need` along one dim, each counted from the begin of its own tensor."""
    found = []
    before_own = 0
    for start, end in own:
        before_need = 0
        for first, last in need:
            low, high = max(start, first), min(end, last)
            if low < high:
                here, there = before_own - start, before_need - first
                found.append((slice(low + here, high + here), slice(low + there, high + there)))
            before_need += last - first
        before_own += end - start
    return found
