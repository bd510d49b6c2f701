"""What a step of n samples costs the ranks that hold one model together, and what it takes of their memory.

Every exchange makes the ranks wait for the slowest, layer by layer:

    forward, backward = sum over layers of  max over ranks of seconds + seconds of the layer's collectives
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from evener.oracle.apportion import Worker
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.partition import Mode, ModelSplit
from evener.oracle.cost.roofline import BACKWARD, LayerSeconds, layer_seconds
from evener.oracle.cost.topology import LinkCost

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

    def backward(self, samples: float) -> Numbers:
        """Seconds of every layer's backward pass, exchanges included."""
        parts = (self._seconds, self._exchanging, self._copying)
        slowest: Numbers = sum(one.of(samples)[BACKWARD].max(axis=0) for one in parts)
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
