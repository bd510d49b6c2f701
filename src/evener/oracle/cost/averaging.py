"""Prices replicas that agree otherwise than by an all-reduce in every step: they learn a little differently.

    averaging (local steps, DiLoCo)     every replica makes H steps of its own, then parameters are averaged
                                        seconds of a step = slowest replica + all-reduce / H
    server                              every replica sends its gradients to the server and gets parameters back
                                        seconds of a step = slowest replica + 2 (alpha + n beta)
    asynchronous server                 nobody waits; each update has the gradients of one replica
                                        updates per second = min(sum over replicas of 1 / cycle, p / (n beta))

n: bytes of the parameters; beta: of a message while all p replicas use the server's one link.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.oracle.apportion import Worker, apportion
from evener.oracle.cost.mesh import fewest_micro_batches, slowest_of_many
from evener.oracle.cost.model import CostEstimate, CostModel, ranks_of, worst_of
from evener.oracle.cost.topology import all_reduce_seconds
from evener.oracle.division.layout import ring_bytes

_OUTER_COPIES = 2
"""Of the parameters: those before the local steps, and the momentum of the outer optimiser."""


def price_averaging(model: CostModel, devices: Sequence[int], local_steps: int) -> CostEstimate:
    """What a step costs if `devices` average their parameters after every `local_steps` steps.

    Raises:
        DoesNotFit: one of the devices cannot hold one sample.
    """
    nbytes, size = model.parameter_bytes, len(devices)
    accumulate, sizes, computing = _computing(model, devices)
    channel = model.topology.ring(devices)
    exchanging = all_reduce_seconds(nbytes, size, channel.alpha, channel.beta) / local_steps
    return CostEstimate(
        strategy="averaging",
        accumulate=accumulate,
        local_steps=local_steps,
        compute_seconds=computing,
        communication_seconds=exchanging,
        sent_bytes=round(ring_bytes(nbytes, size) / local_steps),
        memory_bytes=_memory(model, sizes, copies=_OUTER_COPIES),
        bottleneck=worst_of([(computing, "computing"), (exchanging, "the averaging of parameters")]),
        shares=(1.0,) * size,
        **ranks_of([[device] for device in devices], sizes),
    )


def price_server(model: CostModel, devices: Sequence[int], hub: int, *, asynchronous: bool) -> CostEstimate:
    """What a step costs if `devices` send gradients to a server beside device `hub`, and get parameters back.

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
    return CostEstimate(
        strategy="asynchronous server" if asynchronous else "server",
        accumulate=accumulate,
        compute_seconds=computing,
        communication_seconds=exchanging,
        waiting_seconds=waiting,
        sent_bytes=nbytes,
        memory_bytes=_memory(model, sizes),
        bottleneck=worst_of(
            [
                (computing, "computing"),
                (exchanging, "gradients to the server and parameters from it"),
                (waiting, "waiting at the server's link, which is busy with the others"),
            ]
        ),
        shares=(1.0,) * size,
        **ranks_of([[device] for device in devices], sizes),
    )


def _computing(model: CostModel, devices: Sequence[int], *, equal: bool = False) -> tuple[int, tuple[int, ...], float]:
    """(micro-batches, samples of every replica in one, seconds of the slowest), as few micro-batches as fit."""
    workers = [model.workers[device] for device in devices]
    if equal:
        workers = [Worker(unit_seconds=1.0, most=worker.most) for worker in workers]
    accumulate = fewest_micro_batches(model.job.batch_size, [worker.most for worker in workers])
    sizes = apportion(-(-model.job.batch_size // accumulate), workers)
    busy = [(device, n) for device, n in zip(devices, sizes, strict=True) if n]
    seconds = max(
        accumulate * model.workers[device].seconds(n)
        - (accumulate - 1) * model.update_seconds(device, model.parameter_bytes)
        for device, n in busy
    )
    return accumulate, sizes, seconds * slowest_of_many(model, devices)


def _memory(model: CostModel, sizes: Sequence[int], copies: int = 0) -> tuple[int, ...]:
    state = model.whole_state_bytes + copies * model.parameter_bytes
    return tuple(round(state + n * model.whole_sample_bytes) for n in sizes)
