"""Prices data parallelism, divisions of a model, and hybrids of both: groups of ranks that each hold one model.

    groups of one rank           data parallelism
    one group                    filter, channel, hybrid, sharded, spatial
    several groups of several    data+filter and so on: the mesh of groups x members

Also prices replicas that synchronise without an all-reduce in every step and therefore train slightly differently:

    averaging (local steps, DiLoCo)     every replica makes H local steps, then parameters are averaged
                                        seconds of a step = slowest replica + all-reduce / H
    server                              every replica sends its gradients to the server and receives parameters
                                        seconds of a step = slowest replica + 2 (alpha + n beta)
    asynchronous server                 replicas do not wait; each update uses the gradients of one replica
                                        updates per second = min(sum over replicas of 1 / cycle, p / (n beta))

n: bytes of the parameters; beta: of a message while all p replicas use the server's one link.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import cast

from evener.oracle.apportion import NodeCost, apportion, fewest_micro_batches
from evener.oracle.cost.model import CostEstimate, CostModel, ranks_of
from evener.oracle.cost.partition import Mode
from evener.oracle.cost.replica import ReplicaCost, exchange_gradients, make_replicas
from evener.oracle.cost.step_breakdown import StepBreakdown
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.records.plan import Strategy


def price_mesh(
    model: CostModel, groups: Sequence[Sequence[int]], mode: Mode = "none", accumulate: int | None = None
) -> CostEstimate:
    """Return the cost of a step whose samples are divided among `groups`, each of which divides the model by `mode`.

    Args:
        model: the job and the machines.
        groups: devices of each replica; the groups may differ in size.
        mode: `none` if all groups have one device.
        accumulate: micro-batches of a step; by default the power of two that fits the memory and is fastest.

    Raises:
        DoesNotFit: the groups together cannot hold a micro-batch, or one of them cannot hold one sample.
    """
    replicas = make_replicas(model, groups, mode)
    if accumulate is not None:
        return _price(model, groups, mode, replicas, accumulate)
    max_samples = [replica.max_samples for replica in replicas]
    accumulate = fewest_micro_batches(model.job.batch_size, max_samples)
    estimate = _price(model, groups, mode, replicas, accumulate)
    while _is_bounded(estimate, groups, max_samples) and 2 * accumulate <= model.job.batch_size:
        accumulate *= 2
        smaller = _price(model, groups, mode, replicas, accumulate)
        if smaller.step_seconds >= estimate.step_seconds:
            break
        estimate = smaller
    return estimate


def _is_bounded(estimate: CostEstimate, groups: Sequence[Sequence[int]], max_samples: Sequence[int | None]) -> bool:
    """Return whether memory limits the samples of a replica; smaller micro-batches then balance better."""
    firsts = running_sums((len(group) for group in groups[:-1]), initial=0)
    return len(groups) > 1 and any(
        estimate.samples[first] == limit for first, limit in zip(firsts, max_samples, strict=True)
    )


def _price(
    model: CostModel, groups: Sequence[Sequence[int]], mode: Mode, replicas: Sequence[ReplicaCost], accumulate: int
) -> CostEstimate:
    micro = -(-model.job.batch_size // accumulate)
    sizes = apportion(micro, [replica.worker(micro / len(groups)) for replica in replicas])
    busy = [(replica, n) for replica, n in zip(replicas, sizes, strict=True) if n]
    slowest, most_samples = max(busy, key=lambda pair: pair[0].seconds(pair[1]))
    devices = [device for group in groups for device in group]
    gradients = exchange_gradients(model, replicas, slowest.backward(most_samples))
    statistics = accumulate * model.statistics_seconds(devices) * (len(groups) > 1 or mode == "spatial")
    update = max(replica.update_seconds for replica in replicas)
    stretch = model.stretch(devices)
    longest, n = max(busy, key=lambda pair: pair[0].computing(pair[1]))
    computing = (accumulate * longest.computing(n) + update) * stretch
    inside = accumulate * slowest.exchanging(most_samples)
    waiting = _beyond_rounding(
        accumulate * slowest.seconds(most_samples) - inside + update - computing / stretch, computing
    )
    statistics_bytes = (len(devices) - 1) * model.statistics_bytes * (statistics > 0)
    sent = accumulate * (max(replica.sent_bytes(n) for replica, n in busy) + statistics_bytes) + gradients.sent_bytes
    thin, copies = (accumulate * seconds * stretch for seconds in longest.overhead(n))
    parts = StepBreakdown(
        computing=computing - thin - copies - update * stretch,
        thin_layers=thin,
        copies=copies + gradients.packing,
        update=update * stretch,
        layers=inside,
        gradients=gradients.seconds,
        statistics=statistics,
        slower_ranks=waiting,
    )
    return CostEstimate(
        strategy=_strategy_name(mode, len(groups), len(devices)),
        accumulate=accumulate,
        parts=parts,
        sent_bytes=round(sent),
        bottleneck=parts.longest(_BOTTLENECKS),
        shares=tuple(share / sum(replica.shares) for replica in replicas for share in replica.shares),
        memory_bytes=tuple(
            nbytes for replica, n in zip(replicas, sizes, strict=True) for nbytes in replica.memory_bytes(n)
        ),
        **ranks_of([replica.devices for replica in replicas], sizes),
    )


_BOTTLENECKS = {
    "compute_seconds": "computing",
    "layers": "exchanges between layers, inside of a replica",
    "gradients": "the all-reduce of gradients",
    "statistics": "latency of the many small exchanges of BatchNorm",
    "slower_ranks": "waiting for the slowest rank of every layer",
}


def _beyond_rounding(difference: float, size: float) -> float:
    """Return `difference` of numbers of magnitude `size`, or zero if it is negative or a rounding error."""
    return difference if difference > 1e-9 * size else 0.0


def _strategy_name(mode: Mode, groups: int, devices: int) -> Strategy:
    """Return the strategy's name for a mesh of `groups`."""
    if devices == 1:
        return "serial"
    if mode == "none":
        return "data"
    return cast(Strategy, mode if groups == 1 else f"data+{mode}")


_OUTER_COPIES = 2
"""Copies of the parameters that averaging needs: those before the local steps, and the outer optimizer's momentum."""


def price_averaging(model: CostModel, devices: Sequence[int], local_steps: int) -> CostEstimate:
    """Return the cost of a step if `devices` average their parameters after every `local_steps` steps.

    Raises:
        DoesNotFit: one of the devices cannot hold one sample.
    """
    nbytes, size = model.parameter_bytes, len(devices)
    accumulate, sizes, computing = _computing(model, devices)
    channel = model.topology.ring(devices)
    exchanging = all_reduce_seconds(nbytes, size, channel.alpha, channel.beta) / local_steps
    parts = StepBreakdown(computing=computing, parameters=exchanging)
    return CostEstimate(
        strategy="averaging",
        accumulate=accumulate,
        local_steps=local_steps,
        parts=parts,
        sent_bytes=round(ring_bytes(nbytes, size) / local_steps),
        memory_bytes=_memory(model, sizes, copies=_OUTER_COPIES),
        bottleneck=parts.longest({"compute_seconds": "computing", "parameters": "the averaging of parameters"}),
        shares=(1.0,) * size,
        **ranks_of([[device] for device in devices], sizes),
    )


def price_server(model: CostModel, devices: Sequence[int], hub: int, *, asynchronous: bool) -> CostEstimate:
    """Return the cost of a step if `devices` send gradients to a server at device `hub` and receive parameters.

    Raises:
        DoesNotFit: one of the devices cannot hold one sample.
    """
    nbytes, size = model.parameter_bytes, len(devices)
    channel = model.topology.star(hub, devices)
    accumulate, sizes, computing = _computing(model, devices, equal=asynchronous)
    exchanging, waiting = 2 * channel.seconds(nbytes), 0.0
    if asynchronous:
        workers = [model.workers[device] for device in devices]
        alone = [accumulate * worker.seconds(n) for worker, n in zip(workers, sizes, strict=True)]
        exchanging = 2 * channel.seconds(nbytes) / size
        computing = max(0.0, size / sum(1 / (seconds + exchanging) for seconds in alone) - exchanging)
        waiting = max(0.0, nbytes * channel.beta - computing - exchanging)
    parts = StepBreakdown(computing=computing, parameters=exchanging, server_link=waiting)
    return CostEstimate(
        strategy="asynchronous server" if asynchronous else "server",
        accumulate=accumulate,
        parts=parts,
        sent_bytes=nbytes,
        memory_bytes=_memory(model, sizes),
        bottleneck=parts.longest(
            {
                "compute_seconds": "computing",
                "parameters": "gradients to the server and parameters from it",
                "server_link": "waiting at the server's link, which is busy with the others",
            }
        ),
        shares=(1.0,) * size,
        **ranks_of([[device] for device in devices], sizes),
    )


def _computing(model: CostModel, devices: Sequence[int], *, equal: bool = False) -> tuple[int, tuple[int, ...], float]:
    """Return (micro-batches, samples of each replica in one, seconds of the slowest), with the fewest micro-batches."""
    workers = [model.workers[device] for device in devices]
    if equal:
        workers = [NodeCost(unit_seconds=1.0, max_units=worker.max_units) for worker in workers]
    accumulate = fewest_micro_batches(model.job.batch_size, [worker.max_units for worker in workers])
    sizes = apportion(-(-model.job.batch_size // accumulate), workers)
    busy = [(device, n) for device, n in zip(devices, sizes, strict=True) if n]
    seconds = max(
        accumulate * model.workers[device].seconds(n)
        - (accumulate - 1) * model.update_seconds(device, model.parameter_bytes)
        for device, n in busy
    )
    return accumulate, sizes, seconds * model.stretch(devices)


def _memory(model: CostModel, sizes: Sequence[int], copies: int = 0) -> tuple[int, ...]:
    state = model.whole_state_bytes + copies * model.parameter_bytes
    return tuple(round(state + n * model.whole_sample_bytes) for n in sizes)
