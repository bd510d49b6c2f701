"""The paths of messages between the devices of a profile, and their cost: alone, in rings and chains, and to a server.

A message of n bytes takes alpha + n beta seconds (alpha: latency [s], beta [s/byte]). A ring all-reduce over p ranks
takes 2 (p-1) (alpha + n/p beta) seconds (Patarasuk & Yuan 2009). A ring or a chain is as fast as its slowest hop. The
bandwidth of a hop is that of its link, or its part of a bandwidth shared with other messages: inside a node, at the
port of a node, or at the port of a leaf.

    flows through the same port at once    each gets at most  shared_bandwidth / flows

Collectives visit the devices node by node, as NCCL's rings do, so that few hops leave a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from evener.records.errors import InvalidValue, require
from evener.records.profile import ClusterProfile, Fabric


@dataclass(frozen=True)
class LinkCost:
    """The cost of a message while its collective runs: alpha + bytes * beta seconds.

    Attributes:
        alpha: seconds.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "alpha", self.alpha, "zero seconds or more")
        require(self.beta >= 0, "beta", self.beta, "zero seconds per byte or more")

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of `nbytes`."""
        return self.alpha + nbytes * self.beta


def all_reduce_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Return the seconds of a ring all-reduce of `nbytes` over `size` ranks: 2 (p-1) (alpha + n/p beta)."""
    return 0.0 if size < 2 else 2 * (size - 1) * (alpha + nbytes / size * beta)


_LEVELS = ("node", "leaf", "cluster")
_Hop: TypeAlias = tuple[int, int]
"""The devices that a message goes from and to."""


class Topology:
    """The links of a profile; devices are named by their index in it."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.nodes = [device.node for device in profile.devices]
        self._leaves = [device.leaf for device in profile.devices]
        self._fabrics: dict[int, Fabric] = {_LEVELS.index(fabric.within): fabric for fabric in profile.fabrics}
        self._links = {frozenset((link.source, link.target)): (link.alpha, link.beta) for link in profile.links}
        self._worst = _worst_by_level((self._level(*sorted(pair)), cost) for pair, cost in self._links.items())
        self._learnt = profile.learnt
        self._known: dict[tuple[_Hop, ...], LinkCost] = {}
        first = {node: index for index, node in reversed(list(enumerate(self.nodes)))}
        order = sorted(range(len(self.nodes)), key=lambda i: (self._leaves[i], first[self.nodes[i]], i))
        self._position = {device: position for position, device in enumerate(order)}

    def ordered(self, devices: Iterable[int]) -> list[int]:
        """Return `devices` leaf by leaf and node by node, in the order of a ring."""
        return sorted(devices, key=self._position.__getitem__)

    def ring(self, *groups: Sequence[int]) -> LinkCost:
        """Return the channel of rings through all `groups` at once: the slowest hop's bandwidth, the mean hop's
        latency.
        """
        rings = [self.ordered(group) for group in groups if len(group) > 1]
        return self._channel(hop for ring in rings for hop in zip(ring, [*ring[1:], ring[0]], strict=True))

    def chain(self, *groups: Sequence[int]) -> LinkCost:
        """Return the channel of messages in both directions between neighbours of all `groups` (in their own order)."""
        return self._channel(hop for group in groups for a, b in pairwise(group) for hop in ((a, b), (b, a)))

    def star(self, hub: int, devices: Sequence[int]) -> LinkCost:
        """Return the channel of simultaneous messages from all `devices` to `hub`, through its one link; the reverse is
        equal. That link is as fast as the fastest message to it.
        """
        outside = [(device, hub) for device in devices if self.nodes[device] != self.nodes[hub]]
        inside = [(device, hub) for device in devices if self.nodes[device] == self.nodes[hub] and device != hub]
        channel = self._channel([*outside, *inside])
        alone = min((self._alone(*hop)[1] for hop in outside or inside), default=0.0) * self._learnt
        return LinkCost(channel.alpha, max(channel.beta, len(outside or inside) * alone))

    def _level(self, source: int, target: int) -> int:
        if self.nodes[source] == self.nodes[target]:
            return 0
        return 1 if self._leaves[source] == self._leaves[target] else 2

    def _channel(self, hops: Iterable[_Hop]) -> LinkCost:
        key = tuple(hops)
        if key not in self._known:
            self._known[key] = self._shared(key)
        return self._known[key]

    def _shared(self, hops: Sequence[_Hop]) -> LinkCost:
        """Return the mean latency and worst bandwidth of `hops`, all of them in use at once."""
        if not hops:
            return LinkCost(0.0, 0.0)
        alone = [self._alone(*hop) for hop in hops]
        alpha = sum(alpha for alpha, _ in alone) / len(alone)
        beta = max([*(beta for _, beta in alone), *self._shares(hops)])
        return LinkCost(alpha * self._learnt, beta * self._learnt)

    def _alone(self, source: int, target: int) -> tuple[float, float]:
        """Return alpha and beta of a message that shares its path with no other message."""
        level = self._level(source, target)
        near = sorted(self._fabrics, key=lambda other: (abs(other - level), -other))
        measured = self._links.get(frozenset((source, target)))
        if measured is None and near:
            return self._fabrics[near[0]].alpha, self._fabrics[near[0]].beta
        cost = measured or self._worst.get(level) or self._worst.get(-1)
        if cost is None:
            pair = f"{self.nodes[source]} and {self.nodes[target]}"
            raise InvalidValue("links", "nothing", f"known between {pair}: measured links, or fabrics")
        return cost

    def _shares(self, hops: Sequence[_Hop]) -> Iterator[float]:
        """Yield the seconds per byte that the busiest ports leave to each message."""
        for level, domains in ((0, self.nodes), (1, self.nodes), (2, self._leaves)):
            fabric = self._fabrics.get(level)
            if fabric is None or fabric.shared_bandwidth is None:
                continue
            passing = [hop for hop in hops if (self._level(*hop) >= level if level else self._level(*hop) == 0)]
            for end in (0, 1):
                flows = Counter(domains[hop[end]] for hop in passing)
                yield max(flows.values(), default=0) / fabric.shared_bandwidth


def _worst_by_level(costs: Iterable[tuple[int, tuple[float, float]]]) -> dict[int, tuple[float, float]]:
    """Return the largest alpha and the largest beta of every level, and of all levels under -1."""
    worst: dict[int, tuple[float, float]] = {}
    for level, (alpha, beta) in costs:
        for key in (level, -1):
            known = worst.get(key, (0.0, 0.0))
            worst[key] = (max(known[0], alpha), max(known[1], beta))
    return worst
