"""The exchange of gradients between replicas: when its buckets are ready, and what of it no backward pass hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.oracle.communication import Channel, all_reduce_seconds, ring_bytes
from evener.oracle.forecast.layers import Numbers
from evener.oracle.forecast.replica import Replica
from evener.oracle.forecast.scenario import Scenario

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


@dataclass(frozen=True)
class _Sum:
    """Gradients, in bytes of every layer, that are added up in rings of `size` ranks."""

    gradients: Numbers
    size: int
    channel: Channel


def exchange_gradients(scenario: Scenario, replicas: Sequence[Replica], backward: Numbers) -> GradientExchange:
    """The all-reduce of gradients among `replicas`, every rank with its counterparts.

    Strips of images leave partial sums on every rank: those are added up over all ranks.

    Args:
        scenario: the job and the machines.
        replicas: that hold the same model.
        backward: seconds of every layer's backward pass of the slowest replica, during which buckets are sent.
    """
    sums = [one for one in _sums(scenario, replicas) if one.size > 1]
    totals = [float(one.gradients.sum()) for one in sums]
    sent = sum(ring_bytes(round(total), one.size) for one, total in zip(sums, totals, strict=True))
    if scenario.job.overlap:
        bucket = scenario.job.bucket_bytes
        seconds = sum(exposed_seconds(one.gradients, backward, bucket, one.size, one.channel) for one in sums)
        return GradientExchange(seconds=seconds, packing=0.0, sent_bytes=sent)
    slowest = min(scenario.device(device).bandwidth for replica in replicas for device in replica.devices)
    return GradientExchange(
        seconds=sum(
            all_reduce_seconds(total, one.size, one.channel.alpha, one.channel.beta)
            for one, total in zip(sums, totals, strict=True)
        ),
        packing=_PACKING_PASSES * sum(totals) / slowest,
        sent_bytes=sent,
    )


def _sums(scenario: Scenario, replicas: Sequence[Replica]) -> list[_Sum]:
    first = replicas[0]
    gradients: Numbers = np.max([first.parameter_bytes(rank) for rank in range(len(first.devices))], axis=0)
    if first.mode != "spatial" or first.division is None:
        return [_Sum(gradients, *_counterparts(scenario, replicas))]
    everybody = [device for replica in replicas for device in replica.devices]
    together = (len(everybody), scenario.topology.ring(everybody))
    if scenario.job.published:
        return [_Sum(gradients, *together)]
    strips = gradients * first.division.by_rows
    return [_Sum(strips, *together), _Sum(gradients - strips, *_counterparts(scenario, replicas))]


def _counterparts(scenario: Scenario, replicas: Sequence[Replica]) -> tuple[int, Channel]:
    """Ranks in a ring of counterparts, and its channel: first ranks with first ranks and so on, all rings at once."""
    members = max(len(replica.devices) for replica in replicas)
    rings = ([replica.devices[rank % len(replica.devices)] for replica in replicas] for rank in range(members))
    return len(replicas), scenario.topology.ring(*rings)


def exposed_seconds(gradients: Numbers, backward: Numbers, bucket_bytes: int, size: int, channel: Channel) -> float:
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
