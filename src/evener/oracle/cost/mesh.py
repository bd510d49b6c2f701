"""Prices data parallelism, the divisions of a model, and hybrids of both: groups of ranks, each holding one model.

    groups of one rank           data parallelism
    one group                    filter, channel, hybrid, sharded, spatial
    several groups of several    data+filter and so on: the mesh of groups x members

The groups exchange gradients in buckets, each as soon as the backward pass has filled it; what goes on after the
backward pass counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from math import inf
from statistics import NormalDist
from typing import TypeAlias, cast

import numpy as np

from evener.errors import DoesNotFit
from evener.oracle.apportion import apportion
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostEstimate, CostModel, ranks_of, worst_of
from evener.oracle.cost.partition import Mode
from evener.oracle.cost.replica import ReplicaCost
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.plan import Strategy


def price_mesh(
    model: CostModel, groups: Sequence[Sequence[int]], mode: Mode = "none", accumulate: int | None = None
) -> CostEstimate:
    """What a step costs whose samples are divided among `groups` and whose model is divided in each by `mode`.

    Args:
        model: the job and the machines.
        groups: of devices; those of one replica together, not necessarily equally many.
        mode: `none` if all groups are of one device.
        accumulate: micro-batches of a step; by default as few, 1, 2, 4 ..., as the memory allows, or as pay.

    Raises:
        DoesNotFit: the groups together cannot hold a micro-batch, or one of them not even one sample.
    """
    replicas = make_replicas(model, groups, mode)
    if accumulate is not None:
        return _price(model, groups, mode, replicas, accumulate)
    most = [replica.most for replica in replicas]
    accumulate = fewest_micro_batches(model.job.batch_size, most)
    estimate = _price(model, groups, mode, replicas, accumulate)
    while _is_bounded(estimate, groups, most) and 2 * accumulate <= model.job.batch_size:
        accumulate *= 2
        smaller = _price(model, groups, mode, replicas, accumulate)
        if smaller.step_seconds >= estimate.step_seconds:
            break
        estimate = smaller
    return estimate


def _is_bounded(estimate: CostEstimate, groups: Sequence[Sequence[int]], most: Sequence[int | None]) -> bool:
    """Whether a replica's memory, and not its speed, decides about its samples: smaller micro-batches are fairer."""
    firsts = running_sums((len(group) for group in groups[:-1]), initial=0)
    return len(groups) > 1 and any(estimate.samples[first] == room for first, room in zip(firsts, most, strict=True))


def _price(
    model: CostModel, groups: Sequence[Sequence[int]], mode: Mode, replicas: Sequence[ReplicaCost], accumulate: int
) -> CostEstimate:
    micro = -(-model.job.batch_size // accumulate)
    sizes = apportion(micro, [replica.worker(micro / len(groups)) for replica in replicas])
    busy = [(replica, n) for replica, n in zip(replicas, sizes, strict=True) if n]
    slowest, most = max(busy, key=lambda pair: pair[0].seconds(pair[1]))
    devices = [device for group in groups for device in group]
    gradients = _exchange_gradients(model, replicas, slowest.backward(most))
    statistics = accumulate * model.statistics_seconds(devices) * (len(groups) > 1 or mode == "spatial")
    update = max(replica.update_seconds for replica in replicas)
    stretch = slowest_of_many(model, devices)
    computing = (accumulate * max(replica.computing(n) for replica, n in busy) + update) * stretch
    inside = accumulate * slowest.exchanging(most)
    waiting = _beyond_rounding(accumulate * slowest.seconds(most) - inside + update - computing / stretch, computing)
    statistics_bytes = (len(devices) - 1) * model.statistics_bytes * (statistics > 0)
    sent = accumulate * (max(replica.sent_bytes(n) for replica, n in busy) + statistics_bytes) + gradients.sent_bytes
    limits = (
        (computing, "computing"),
        (inside, "exchanges between layers, inside of a replica"),
        (gradients.seconds, "the all-reduce of gradients"),
        (statistics, "latency of the many small exchanges of BatchNorm"),
        (waiting, "waiting for the slowest rank of every layer"),
    )
    return CostEstimate(
        strategy=_strategy_name(mode, len(groups), len(devices)),
        accumulate=accumulate,
        compute_seconds=computing + gradients.packing,
        communication_seconds=inside + gradients.seconds + statistics,
        waiting_seconds=waiting,
        sent_bytes=round(sent),
        bottleneck=worst_of(limits),
        shares=tuple(share / sum(replica.shares) for replica in replicas for share in replica.shares),
        memory_bytes=tuple(n for one, size in zip(replicas, sizes, strict=True) for n in one.memory_bytes(size)),
        **ranks_of([replica.devices for replica in replicas], sizes),
    )


def _beyond_rounding(difference: float, size: float) -> float:
    """`difference` of numbers of `size`, zero where it is negative or but a rounding error."""
    return difference if difference > 1e-9 * size else 0.0


def fewest_micro_batches(batch_size: int, most: Sequence[int | None]) -> int:
    """As few micro-batches, 1, 2, 4 ..., as let replicas that hold `most` samples each (None: any) hold one.

    Raises:
        DoesNotFit: a replica cannot hold one sample.
    """
    if any(room == 0 for room in most):
        raise DoesNotFit("not even one sample fits the memory of one of the devices")
    room = sum(inf if one is None else one for one in most)
    accumulate = 1
    while -(-batch_size // accumulate) > room:
        accumulate *= 2
    return accumulate


def make_replicas(model: CostModel, groups: Sequence[Sequence[int]], mode: Mode) -> list[ReplicaCost]:
    """One replica a group; those that cannot differ are made once.

    Raises:
        DoesNotFit: a model does not fit the memory of its group.
    """
    chain = model.topology.chain if mode == "spatial" else model.topology.ring
    channel = chain(*groups) if any(len(group) > 1 for group in groups) else model.topology.chain()
    known: dict[tuple[int, ...], ReplicaCost] = {}
    replicas = []
    for group in groups:
        kinds = tuple(model.kinds[device] for device in group)
        like = known.setdefault(kinds, ReplicaCost(model, group, mode, channel)) if kinds not in known else known[kinds]
        if like.most == 0:
            names = ", ".join(model.name(device) for device in group)
            raise DoesNotFit(f"not even one sample fits the memory of {names}")
        replicas.append(like.on(group))
    return replicas


def _strategy_name(mode: Mode, groups: int, devices: int) -> Strategy:
    """The name of a mesh of `groups`."""
    if devices == 1:
        return "serial"
    if mode == "none":
        return "data"
    return cast(Strategy, mode if groups == 1 else f"data+{mode}")


def slowest_of_many(model: CostModel, devices: Sequence[int]) -> float:
    """How much longer than an average device the slowest of `devices` takes, that are alike but for their spread.

    The expected greatest of p normal deviates, by Blom's approximation (1958): the quantile of (p - 3/8) / (p + 1/4).
    """
    spread = max(model.profile.devices[device].spread for device in devices)
    size = len(devices)
    return 1 + spread * NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 and spread else 1.0


_PACKING_PASSES = 4
"""Reads and writes of a gradient that is copied into one packed buffer and back."""


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """What replicas exchange after, or during, their backward passes.

    Attributes:
        seconds: in which nothing else goes on.
        packing: seconds of copying gradients into one buffer and back.
        sent_bytes: of the rank that sends most.
    """

    seconds: float
    packing: float
    sent_bytes: float


def _exchange_gradients(model: CostModel, replicas: Sequence[ReplicaCost], backward: Numbers) -> GradientExchange:
    """The all-reduce of gradients among `replicas`, every rank with its counterparts.

    Strips of images leave partial sums on every rank: those are added up over all ranks.

    Args:
        model: the job and the machines.
        replicas: that hold the same model.
        backward: seconds of every layer's backward pass of the slowest replica, during which buckets are sent.
    """
    rings = [(float(gradients.sum()), gradients, ring) for gradients, ring in _gradient_rings(model, replicas)]
    sent = sum(ring_bytes(round(total), size) for total, _, (size, _) in rings)
    if model.job.overlap:
        bucket = model.job.bucket_bytes
        seconds = sum(exposed_seconds(gradients, backward, bucket, *ring) for _, gradients, ring in rings)
        return GradientExchange(seconds=seconds, packing=0.0, sent_bytes=sent)
    slowest = min(model.device(device).bandwidth for replica in replicas for device in replica.devices)
    return GradientExchange(
        seconds=sum(all_reduce_seconds(total, size, link.alpha, link.beta) for total, _, (size, link) in rings),
        packing=_PACKING_PASSES * sum(total for total, *_ in rings) / slowest,
        sent_bytes=sent,
    )


_Ring: TypeAlias = tuple[int, LinkCost]
"""Number of ranks, and the channel between them."""


def _gradient_rings(model: CostModel, replicas: Sequence[ReplicaCost]) -> list[tuple[Numbers, _Ring]]:
    """Gradients, in bytes of every layer, and the ring in which they are added up, where there are any."""
    first, counterparts = replicas[0], _counterparts(model, replicas)
    found = [(first.gradient_bytes, counterparts)]
    if first.mode == "spatial" and first.division is not None:
        everybody = [device for replica in replicas for device in replica.devices]
        together = (len(everybody), model.topology.ring(everybody))
        strips = first.gradient_bytes * (model.job.published | first.division.layers.adds_gradients)
        found = [(strips, together), (first.gradient_bytes - strips, counterparts)]
    return [(gradients, ring) for gradients, ring in found if ring[0] > 1 and gradients.any()]


def _counterparts(model: CostModel, replicas: Sequence[ReplicaCost]) -> _Ring:
    """Ranks in a ring of counterparts, and its channel: first ranks with first ranks and so on, all rings at once."""
    members = max(len(replica.devices) for replica in replicas)
    rings = ([replica.devices[rank % len(replica.devices)] for replica in replicas] for rank in range(members))
    return len(replicas), model.topology.ring(*rings)


def exposed_seconds(gradients: Numbers, backward: Numbers, bucket_bytes: int, size: int, channel: LinkCost) -> float:
    """Seconds that the exchange of buckets goes on after the backward pass has ended.

    Buckets are filled from the last layer to the first and sent one after the other, each as soon as it is full.

    Args:
        gradients: bytes of every layer.
        backward: seconds of every layer.
        bucket_bytes: of a full bucket.
        size: replicas.
        channel: of their ring.
    """
    ready = np.cumsum(backward[::-1])
    filled = np.cumsum(gradients[::-1])
    ends = np.flatnonzero(np.diff(filled // bucket_bytes, append=filled[-1] // bucket_bytes + 1))
    free, sent = 0.0, 0.0
    for end in ends:
        seconds = all_reduce_seconds(filled[end] - sent, size, channel.alpha, channel.beta)
        free, sent = max(free, ready[end]) + seconds, filled[end]
    return max(0.0, float(free - ready[-1]))
