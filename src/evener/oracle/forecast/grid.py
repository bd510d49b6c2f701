"""Prices data parallelism, the divisions of a model, and hybrids of both: groups of ranks, each holding one model.

groups of one rank           data parallelism
one group                    filter, channel, hybrid, sharded, spatial
several groups of several    data+filter and so on: the mesh of groups x members
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sums
from math import inf
from statistics import NormalDist
from typing import cast

from evener.errors import DoesNotFit
from evener.oracle.apportion import apportion
from evener.oracle.forecast.divide import Mode
from evener.oracle.forecast.exchange import exchange_gradients
from evener.oracle.forecast.quote import Quote, worst_of
from evener.oracle.forecast.replica import Replica
from evener.oracle.forecast.scenario import Scenario
from evener.plan import Strategy


def price_grid(
    scenario: Scenario, groups: Sequence[Sequence[int]], mode: Mode = "none", accumulate: int | None = None
) -> Quote:
    """What a step costs whose samples are divided among `groups` and whose model is divided in each by `mode`.

    Args:
        scenario: the job and the machines.
        groups: of devices; those of one replica together, not necessarily equally many.
        mode: `none` if all groups are of one device.
        accumulate: micro-batches of a step; by default as few, 1, 2, 4 ..., as the memory allows, or as pay.

    Raises:
        DoesNotFit: the groups together cannot hold a micro-batch, or one of them not even one sample.
    """
    replicas = make_replicas(scenario, groups, mode)
    if accumulate is not None:
        return _price(scenario, groups, mode, replicas, accumulate)
    most = [replica.most for replica in replicas]
    accumulate = fewest_micro_batches(scenario.job.batch_size, most)
    quote = _price(scenario, groups, mode, replicas, accumulate)
    while _is_bounded(quote, groups, most) and 2 * accumulate <= scenario.job.batch_size:
        accumulate *= 2
        smaller = _price(scenario, groups, mode, replicas, accumulate)
        if smaller.step_seconds >= quote.step_seconds:
            break
        quote = smaller
    return quote


def _is_bounded(quote: Quote, groups: Sequence[Sequence[int]], most: Sequence[int | None]) -> bool:
    """Whether a replica's memory, and not its speed, decides about its samples: smaller micro-batches are fairer."""
    firsts = running_sums((len(group) for group in groups[:-1]), initial=0)
    return len(groups) > 1 and any(quote.samples[first] == room for first, room in zip(firsts, most, strict=True))


def _price(
    scenario: Scenario, groups: Sequence[Sequence[int]], mode: Mode, replicas: Sequence[Replica], accumulate: int
) -> Quote:
    micro = -(-scenario.job.batch_size // accumulate)
    sizes = apportion(micro, [replica.worker(micro / len(groups)) for replica in replicas])
    busy = [(replica, n) for replica, n in zip(replicas, sizes, strict=True) if n]
    costs = [replica.cost(n) for replica, n in busy]
    slowest = max(costs, key=lambda cost: cost.seconds)
    devices = [device for group in groups for device in group]
    gradients = exchange_gradients(scenario, replicas, slowest.backward)
    statistics = accumulate * scenario.statistics_seconds(devices) * (len(groups) > 1 or mode == "spatial")
    update = max(replica.update_seconds() for replica in replicas)
    stretch = slowest_of_many(scenario, devices)
    computing = (accumulate * max(cost.computing for cost in costs) + update) * stretch
    inside = accumulate * slowest.exchanging
    waiting = _beyond_rounding(accumulate * slowest.seconds - inside + update - computing / stretch, computing)
    told_statistics = (len(devices) - 1) * scenario.statistics_bytes * (statistics > 0)
    sent = accumulate * (max(cost.sent_bytes for cost in costs) + told_statistics) + gradients.sent_bytes
    return Quote(
        strategy=strategy_name(mode, len(groups), len(devices)),
        devices=tuple(devices),
        replicas=tuple(index for index, group in enumerate(groups) for _ in group),
        samples=tuple(n for n, group in zip(sizes, groups, strict=True) for _ in group),
        shares=tuple(share / sum(replica.shares) for replica in replicas for share in replica.shares),
        accumulate=accumulate,
        compute_seconds=computing + gradients.packing,
        communication_seconds=inside + gradients.seconds + statistics,
        waiting_seconds=waiting,
        sent_bytes=round(sent),
        memory_bytes=tuple(
            replica.memory_bytes(rank, n)
            for replica, n in zip(replicas, sizes, strict=True)
            for rank in range(len(replica.devices))
        ),
        bottleneck=worst_of(
            (
                (computing, "computing"),
                (inside, "exchanges between layers, inside of a replica"),
                (gradients.seconds, "the all-reduce of gradients"),
                (statistics, "latency of the many small exchanges of BatchNorm"),
                (waiting, "waiting for the slowest rank of every layer"),
            )
        ),
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


def make_replicas(scenario: Scenario, groups: Sequence[Sequence[int]], mode: Mode) -> list[Replica]:
    """One replica a group; those that cannot differ are made once.

    Raises:
        DoesNotFit: a model does not fit the memory of its group.
    """
    chain = scenario.topology.chain if mode == "spatial" else scenario.topology.ring
    channel = chain(*groups) if any(len(group) > 1 for group in groups) else scenario.topology.chain()
    known: dict[tuple[int, ...], Replica] = {}
    replicas = []
    for group in groups:
        kinds = tuple(scenario.kinds[device] for device in group)
        like = known.setdefault(kinds, Replica(scenario, group, mode, channel)) if kinds not in known else known[kinds]
        if like.most == 0:
            names = ", ".join(scenario.name(device) for device in group)
            raise DoesNotFit(f"not even one sample fits the memory of {names}")
        replicas.append(like.on(group))
    return replicas


def strategy_name(mode: Mode, groups: int, devices: int) -> Strategy:
    """The name of a mesh of `groups`."""
    if devices == 1:
        return "serial"
    if mode == "none":
        return "data"
    return cast(Strategy, mode if groups == 1 else f"data+{mode}")


def slowest_of_many(scenario: Scenario, devices: Sequence[int]) -> float:
    """How much longer than an average device the slowest of `devices` takes, that are alike but for their spread.

    The expected greatest of p normal deviates, by Blom's approximation (1958): the quantile of (p - 3/8) / (p + 1/4).
    """
    spread = max(scenario.profile.devices[device].spread for device in devices)
    size = len(devices)
    return 1 + spread * NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 and spread else 1.0
