"""Prices a step of n samples on ranks that hold one model together, and the gradient exchange between such replicas.

In every exchange the ranks wait for the slowest, layer by layer:

    forward, backward = sum over layers of  max over ranks of seconds + seconds of the layer's collectives

Replicas exchange gradients in buckets, each as soon as the backward pass has filled it. Only the part after the
backward pass adds to the step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from evener.oracle.apportion import NodeCost
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.partition import Mode, ModelSplit
from evener.oracle.cost.roofline import BACKWARD, LayerSeconds, layer_seconds
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.oracle.division.layout import ring_bytes
from evener.records.errors import DoesNotFit

_NOTHING = LayerSeconds(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))
_ALL = slice(None)


class ReplicaCost:
    """The cost of `devices` that hold one model together, divided by `mode` in proportion to their speeds.

    Args:
        model: the job and the machines.
        devices: in order of ranks.
        mode: `none` if there is only one device.
        channel: cost of the collectives among them, with all replicas active at once.

    Attributes:
        shares: share of the work of each device.
        division: division of the layers; None on one device.
        state_bytes: each rank's parameters, gradients and optimizer state.
        sample_bytes: one sample's activations on each rank.
        update_seconds: optimizer step of the slowest rank.
        max_samples: samples that the ranks can hold at once; None for no limit.
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
        bounds = map(model.max_samples, self.devices, self.state_bytes, self.sample_bytes)
        self.max_samples = min((bound for bound in bounds if bound is not None), default=None)
        self._known: dict[float, float] = {}
        self._computing: dict[float, float] = {}

    def on(self, devices: Sequence[int]) -> ReplicaCost:
        """Return the same costs on other `devices` of the same kinds; both share a cache of results."""
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
        largest: Numbers = self.division.parameter_bytes.max(axis=0)
        return largest

    def seconds(self, samples: float) -> float:
        """Return the seconds of a forward and backward pass over `samples` samples, exchanges included."""
        if samples not in self._known:
            slowest = float(self._seconds.of(samples).max(axis=1).sum())
            self._known[samples] = slowest + self.exchanging(samples) + self._copying.sum(samples)
        return self._known[samples]

    def computing(self, samples: float) -> float:
        """Return the part of `seconds` in which the rank that computes longest computes."""
        if samples not in self._computing:
            ranks = self._seconds.of(samples).sum(axis=(0, 2))
            self._computing[samples] = float(ranks.max()) + self._copying.sum(samples)
        return self._computing[samples]

    def overhead(self, samples: float, layers: slice = _ALL) -> tuple[float, float]:
        """Return what a division adds to the computing of the rank that computes longest.

        Args:
            samples: samples of a pass.
            layers: layers to look at.

        Returns:
            Seconds that its parts of divided layers take beyond their part of the whole layers' time, and seconds of
            splitting and joining tensors.
        """
        if self.division is None:
            return 0.0, 0.0
        ranks = self._seconds.of(samples)[..., layers].sum(axis=(0, 2))
        longest = int(ranks.argmax())
        thin = float(ranks[longest]) - float(self._whole.of(samples)[:, longest, layers].sum())
        return max(0.0, thin), float(self._copying.of(samples)[..., layers].sum())

    def exchanging(self, samples: float) -> float:
        """Return the part of `seconds` in collectives inside the replica."""
        return self._exchanging.sum(samples)

    def passes(self, samples: float) -> Numbers:
        """Return the seconds of every layer's forward and backward pass, exchanges included, [passes, layers]."""
        parts = (self._seconds, self._exchanging, self._copying)
        slowest: Numbers = sum(part.of(samples).max(axis=1) for part in parts)
        return slowest

    def exchanges(self, samples: float) -> Numbers:
        """Return the seconds of every layer's collectives inside the replica, in both passes."""
        seconds: Numbers = self._exchanging.of(samples).sum(axis=(0, 1)) * np.ones(len(self.model.layers))
        return seconds

    def backward(self, samples: float) -> Numbers:
        """Return the seconds of every layer's backward pass, exchanges included."""
        slowest: Numbers = self.passes(samples)[BACKWARD]
        return slowest

    def sent_bytes(self, samples: float) -> float:
        """Return the bytes of the rank that sends most inside the replica."""
        return samples * float(self.division.sent_bytes.max()) if self.division else 0.0

    def worker(self, samples: float) -> NodeCost:
        """Return an affine cost, fitted through the costs of half of `samples` and of all."""
        few, many = max(1.0, samples / 2), max(2.0, samples)
        cheap, dear = self.seconds(few), self.seconds(many)
        each = max((dear - cheap) / (many - few), 1e-12)
        fixed = max(0.0, cheap - few * each) + self.update_seconds
        return NodeCost(unit_seconds=each, fixed_seconds=fixed, max_units=self.max_samples)

    def memory_bytes(self, samples: int) -> tuple[int, ...]:
        """Return the bytes that every rank needs for `samples` samples at once."""
        pairs = zip(self.state_bytes, self.sample_bytes, strict=True)
        return tuple(round(state + samples * each) for state, each in pairs)

    @cached_property
    def _whole(self) -> LayerSeconds:
        """Every rank's part of the seconds that it would take for whole layers."""
        assert self.division is not None
        split, whole = self.division, [self.model.seconds(device) for device in self.devices]
        part = split.parts.filters * split.parts.channels * split.parts.rows
        fixed, each = (np.concatenate([getattr(one, name) for one in whole], axis=1) for name in ("fixed", "each"))
        return LayerSeconds(fixed * part, each * part)

    def _collectives(self, split: ModelSplit, channel: LinkCost) -> tuple[LayerSeconds, LayerSeconds]:
        """Return the seconds of every layer's exchanges, and of splitting and joining tensors for them."""
        devices = [self.model.device(device) for device in self.devices]
        start = max(device.pass_seconds for device in devices)
        bandwidth = min(device.bandwidth for device in devices)
        passes = (split.forward, split.backward)
        begun = [channel.alpha * exchange.messages + start * exchange.collectives for exchange in passes]
        sent = [channel.beta * exchange.nbytes for exchange in passes]
        copied = (
            [start * np.sign(exchange.copied) for exchange in passes],
            [exchange.copied / bandwidth for exchange in passes],
        )
        return _collective(begun, sent), _collective(*copied)


def _collective(fixed: Sequence[Numbers], each: Sequence[Numbers]) -> LayerSeconds:
    """Return seconds, by pass, that are equal on all ranks of a replica."""
    return LayerSeconds(np.array(fixed)[:, None], np.array(each)[:, None])


def make_replicas(model: CostModel, groups: Sequence[Sequence[int]], mode: Mode) -> list[ReplicaCost]:
    """Return one replica per group; replicas on the same kinds of devices share their costs.

    Raises:
        DoesNotFit: a model does not fit the memory of its group.
    """
    chain = model.topology.chain if mode == "spatial" else model.topology.ring
    channel = chain(*groups) if any(len(group) > 1 for group in groups) else model.topology.chain()
    known: dict[tuple[int, ...], ReplicaCost] = {}
    replicas = []
    for group in groups:
        kinds = tuple(model.kinds[device] for device in group)
        if kinds not in known:
            known[kinds] = ReplicaCost(model, group, mode, channel)
        replica = known[kinds]
        if replica.max_samples == 0:
            names = ", ".join(model.name(device) for device in group)
            raise DoesNotFit(f"not even one sample fits the memory of {names}; leave these devices out")
        replicas.append(replica.on(group))
    return replicas


_PACKING_PASSES = 4
"""Reads and writes of a gradient that is copied into one packed buffer and back."""


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """The gradient exchange of replicas during and after their backward passes.

    Attributes:
        seconds: seconds that the exchange adds to the step.
        packing: seconds of copying gradients into one buffer and back.
        sent_bytes: of the rank that sends most.
    """

    seconds: float
    packing: float
    sent_bytes: float


def exchange_gradients(model: CostModel, replicas: Sequence[ReplicaCost], backward: Numbers) -> GradientExchange:
    """Return the cost of the gradient all-reduce among `replicas`, each rank with its counterparts.

    Strips of images leave partial sums on every rank; these are summed over all ranks.

    Args:
        model: the job and the machines.
        replicas: replicas of the same model.
        backward: seconds of every layer's backward pass on the slowest replica, during which buckets are sent.
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
"""The number of ranks, and the channel between them."""


def _gradient_rings(model: CostModel, replicas: Sequence[ReplicaCost]) -> list[tuple[Numbers, _Ring]]:
    """Return gradients, in bytes of every layer, with the ring that sums them, where there are any."""
    first, counterparts = replicas[0], _counterparts(model, replicas)
    rings = [(first.gradient_bytes, counterparts)]
    if first.mode == "spatial" and first.division is not None:
        devices = [device for replica in replicas for device in replica.devices]
        together = (len(devices), model.topology.ring(devices))
        strips = first.gradient_bytes * (model.job.published | first.division.layers.adds_gradients)
        rings = [(strips, together), (first.gradient_bytes - strips, counterparts)]
    return [(gradients, ring) for gradients, ring in rings if ring[0] > 1 and gradients.any()]


def _counterparts(model: CostModel, replicas: Sequence[ReplicaCost]) -> _Ring:
    """Return the size and channel of the rings of counterparts: first ranks with first ranks and so on, all at once."""
    members = max(len(replica.devices) for replica in replicas)
    rings = ([replica.devices[rank % len(replica.devices)] for replica in replicas] for rank in range(members))
    return len(replicas), model.topology.ring(*rings)


def exposed_seconds(gradients: Numbers, backward: Numbers, bucket_bytes: int, size: int, channel: LinkCost) -> float:
    """Return the seconds that the exchange of buckets continues after the backward pass has ended.

    Buckets fill from the last layer to the first and are sent one after the other, each as soon as it is full.

    Args:
        gradients: bytes of every layer.
        backward: seconds of every layer.
        bucket_bytes: bytes of a full bucket.
        size: number of replicas.
        channel: channel of their ring.
    """
    ready = np.cumsum(backward[::-1])
    filled = np.cumsum(gradients[::-1])
    ends = np.flatnonzero(np.diff(filled // bucket_bytes, append=filled[-1] // bucket_bytes + 1))
    free, sent = 0.0, 0.0
    for end in ends:
        seconds = all_reduce_seconds(filled[end] - sent, size, channel.alpha, channel.beta)
        free, sent = max(free, ready[end]) + seconds, filled[end]
    return max(0.0, float(free - ready[-1]))
