"""What a step of n samples costs the ranks that hold one model together, and what such replicas tell each other.

Every exchange makes the ranks wait for the slowest, layer by layer:

    forward, backward = sum over layers of  max over ranks of seconds + seconds of the layer's collectives

Replicas exchange gradients in buckets, each as soon as the backward pass has filled it; what goes on after the backward
pass counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from evener.oracle.apportion import Worker
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.partition import Mode, ModelSplit
from evener.oracle.cost.roofline import BACKWARD, LayerSeconds, layer_seconds
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.records.errors import DoesNotFit

_NOTHING = LayerSeconds(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))


class ReplicaCost:
    """`devices` that hold one model together, divided by `mode` in proportion to their speeds.

    Args:
        model: the job and the machines.
        devices: in the order of ranks.
        mode: `none` if there is only one device.
        channel: of the collectives among them, all replicas at once.

    Attributes:
        shares: of the work, one a device.
        division: of the layers; None on one device.
        state_bytes: of every rank's parameters, gradients and optimiser state.
        sample_bytes: of one sample's activations on every rank.
        update_seconds: of the optimiser's step of the slowest rank.
        most: samples that the ranks can hold at once; None if nothing bounds them.
    """

    def __init__(self, model: CostModel, devices: Sequence[int], mode: Mode, channel: LinkCost) -> None:
        self.model, self.devices, self.mode = model, tuple(devices), mode
        units = [model.workers[device].unit_seconds for device in self.devices]
        self.shares = tuple(min(units) / unit for unit in units)
        self.division: ModelSplit | None = None
        if mode == "none" or len(self.devices) == 1:
            self._seconds = model.seconds(self.devices[0])
            self._exchanging = self._copying = _NOTHING
            held, self.sample_bytes = [float(model.parameter_bytes)], [model.whole_sample_bytes]
        else:
            self.division = split = model.divide(mode, self.shares)
            self._seconds = layer_seconds(model.layers, [model.device(i) for i in self.devices], split.parts)
            self._exchanging, self._copying = self._collectives(split, channel)
            held = split.parameter_bytes.sum(axis=1).tolist()
            self.sample_bytes = model.sample_bytes(split.kept_bytes, split.value_share).tolist()
        self.state_bytes = [model.state_bytes(nbytes) for nbytes in held]
        self.update_seconds = max(map(model.update_seconds, self.devices, held))
        bounds = map(model.most_samples, self.devices, self.state_bytes, self.sample_bytes)
        self.most = min((bound for bound in bounds if bound is not None), default=None)
        self._known: dict[float, float] = {}

    def on(self, devices: Sequence[int]) -> ReplicaCost:
        """The same on other `devices` of the same kinds; both remember together what was asked of either."""
        if self.devices == tuple(devices):
            return self
        other = copy.copy(self)
        other.devices = tuple(devices)
        return other

    @cached_property
    def gradient_bytes(self) -> Numbers:
        """Bytes of every layer's gradients on the rank that has most of them."""
        if self.division is None:
            return self.model.layers.weight_bytes
        most: Numbers = self.division.parameter_bytes.max(axis=0)
        return most

    def seconds(self, samples: float) -> float:
        """Of a forward and backward pass over `samples` samples, exchanges included."""
        if samples not in self._known:
            slowest = float(self._seconds.of(samples).max(axis=1).sum())
            self._known[samples] = slowest + self.exchanging(samples) + self._copying.sum(samples)
        return self._known[samples]

    def computing(self, samples: float) -> float:
        """Seconds in them of the rank that computes longest."""
        return float(self._seconds.of(samples).sum(axis=(0, 2)).max()) + self._copying.sum(samples)

    def exchanging(self, samples: float) -> float:
        """Seconds in them of all collectives inside the replica."""
        return self._exchanging.sum(samples)

    def passes(self, samples: float) -> Numbers:
        """Seconds of every layer's forward and backward pass, exchanges included, [passes, layers]."""
        parts = (self._seconds, self._exchanging, self._copying)
        slowest: Numbers = sum(one.of(samples).max(axis=1) for one in parts)
        return slowest

    def exchanges(self, samples: float) -> Numbers:
        """Seconds of every layer's collectives inside the replica, in both passes."""
        found: Numbers = self._exchanging.of(samples).sum(axis=(0, 1)) * np.ones(len(self.model.layers))
        return found

    def backward(self, samples: float) -> Numbers:
        """Seconds of every layer's backward pass, exchanges included."""
        slowest: Numbers = self.passes(samples)[BACKWARD]
        return slowest

    def sent_bytes(self, samples: float) -> float:
        """Bytes of the rank that sends most inside the replica."""
        return samples * float(self.division.sent_bytes.max()) if self.division else 0.0

    def worker(self, samples: float) -> Worker:
        """What n samples cost, as a line through the costs of half and of all of `samples`."""
        few, many = max(1.0, samples / 2), max(2.0, samples)
        cheap, dear = self.seconds(few), self.seconds(many)
        each = max((dear - cheap) / (many - few), 1e-12)
        fixed = max(0.0, cheap - few * each) + self.update_seconds
        return Worker(unit_seconds=each, fixed_seconds=fixed, most=self.most)

    def memory_bytes(self, samples: int) -> tuple[int, ...]:
        """Bytes that every rank needs for `samples` samples at once."""
        pairs = zip(self.state_bytes, self.sample_bytes, strict=True)
        return tuple(round(state + samples * each) for state, each in pairs)

    def _collectives(self, split: ModelSplit, channel: LinkCost) -> tuple[LayerSeconds, LayerSeconds]:
        """Seconds of every layer's exchanges, and of taking tensors apart and putting them together for them."""
        devices = [self.model.device(device) for device in self.devices]
        start = max(device.pass_seconds for device in devices)
        bandwidth = min(device.bandwidth for device in devices)
        passes = (split.forward, split.backward)
        begun = [channel.alpha * one.messages + start * one.collectives for one in passes]
        sent = [channel.beta * one.nbytes for one in passes]
        copied = [start * np.sign(one.copied) for one in passes], [one.copied / bandwidth for one in passes]
        return _collective(begun, sent), _collective(*copied)


def _collective(fixed: Sequence[Numbers], each: Sequence[Numbers]) -> LayerSeconds:
    """What takes all ranks of a replica equally long, pass by pass."""
    return LayerSeconds(np.array(fixed)[:, None], np.array(each)[:, None])


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


def exchange_gradients(model: CostModel, replicas: Sequence[ReplicaCost], backward: Numbers) -> GradientExchange:
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
