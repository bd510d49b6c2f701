"""What a step of n samples costs the ranks that hold one model together, and what it takes of their memory.

Every exchange makes the ranks wait for the slowest, layer by layer:

    forward, backward = sum over layers of  max over ranks of seconds + seconds of the layer's collectives
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evener.oracle.apportion import Worker
from evener.oracle.cost.layers import Numbers
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.partition import Mode, ModelSplit, divide_layers
from evener.oracle.cost.roofline import LayerSeconds
from evener.oracle.cost.topology import LinkCost


@dataclass(frozen=True, kw_only=True)
class ReplicaStep:
    """A replica's forward and backward pass over its samples.

    Attributes:
        forward, backward: seconds of every layer, exchanges included.
        computing: seconds of the rank that computes longest.
        exchanging: seconds of all collectives inside the replica.
        sent_bytes: of the rank that sends most.
    """

    forward: Numbers
    backward: Numbers
    computing: float
    exchanging: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return float(self.forward.sum() + self.backward.sum())


class ReplicaCost:
    """`devices` that hold one model together, divided by `mode`.

    Args:
        model: the job and the machines.
        devices: in the order of ranks.
        mode: `none` if there is only one device.
        channel: of the collectives among them, all replicas at once.
        shares: of the work, one a device; by default in proportion to their speeds.

    Attributes:
        most: samples that the ranks can hold at once; None if nothing bounds them.
    """

    def __init__(
        self,
        model: CostModel,
        devices: Sequence[int],
        mode: Mode,
        channel: LinkCost,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.model, self.devices, self.mode, self._channel = model, tuple(devices), mode, channel
        self.shares = tuple(shares) if shares else self._speeds()
        layers = model.layers
        self.division: ModelSplit | None = None
        if len(self.devices) > 1:
            self.division = divide_layers(layers, mode, self.shares, published=model.job.published)
        self._costs: dict[float, ReplicaStep] = {}
        self._seconds: list[LayerSeconds] = [
            model.seconds(device, self.division.parts[rank] if self.division else None)
            for rank, device in enumerate(self.devices)
        ]
        self.most = self._most_samples()

    def on(self, devices: Sequence[int]) -> ReplicaCost:
        """The same on other `devices` of the same kinds; both remember together what was asked of either."""
        if self.devices == tuple(devices):
            return self
        other = copy.copy(self)
        other.devices = tuple(devices)
        return other

    def parameter_bytes(self, rank: int) -> Numbers:
        """Bytes of every layer's parameters on `rank`."""
        layers = self.model.layers
        return self.division.parameter_bytes(layers, rank) if self.division else layers.weight_bytes

    def update_seconds(self) -> float:
        """Seconds of the optimiser's step of the slowest rank."""
        seconds = [
            self.model.update_seconds(device, float(self.parameter_bytes(rank).sum()))
            for rank, device in enumerate(self.devices)
        ]
        return max(seconds)

    def cost(self, samples: float) -> ReplicaStep:
        """What a forward and backward pass over `samples` samples costs."""
        if samples not in self._costs:
            self._costs[samples] = self._cost(samples)
        return self._costs[samples]

    def _cost(self, samples: float) -> ReplicaStep:
        forward = np.stack([seconds.forward(samples) for seconds in self._seconds])
        backward = np.stack([seconds.backward(samples) for seconds in self._seconds])
        computing = float((forward + backward).sum(axis=1).max())
        forward, backward = forward.max(axis=0), backward.max(axis=0)
        if self.division is None:
            return ReplicaStep(forward=forward, backward=backward, computing=computing, exchanging=0.0, sent_bytes=0.0)
        exchanges, channel, size = self.division.exchanges, self._channel, len(self.devices)
        largest = max(self.division.shares)
        ways = {
            "forward": (exchanges.forward_gather, exchanges.forward_reduce),
            "backward": (exchanges.backward_gather, exchanges.backward_reduce),
        }
        start = max(self.model.device(device).pass_seconds for device in self.devices)
        told = {name: _told(samples, *way, exchanges.halo, largest, size, channel, start) for name, way in ways.items()}
        copying = {
            "forward": self._copying(samples, exchanges.forward_copy),
            "backward": self._copying(samples, exchanges.backward_copy),
        }
        copied = float(copying["forward"].sum() + copying["backward"].sum())
        return ReplicaStep(
            forward=forward + told["forward"] + copying["forward"],
            backward=backward + told["backward"] + copying["backward"],
            computing=computing + copied,
            exchanging=float(told["forward"].sum() + told["backward"].sum()),
            sent_bytes=samples * self._sent_bytes(),
        )

    def worker(self, samples: float) -> Worker:
        """What n samples cost, as a line through the costs of half and of all of `samples`."""
        few, many = max(1.0, samples / 2), max(2.0, samples)
        cheap, dear = self.cost(few).seconds, self.cost(many).seconds
        each = max((dear - cheap) / (many - few), 1e-12)
        fixed = max(0.0, cheap - few * each) + self.update_seconds()
        return Worker(unit_seconds=each, fixed_seconds=fixed, most=self.most)

    def memory_bytes(self, rank: int, samples: int) -> int:
        """Bytes that `rank` needs for `samples` samples at once."""
        return round(self.state_bytes(rank) + samples * self.sample_bytes(rank))

    def state_bytes(self, rank: int) -> float:
        """Bytes of `rank`'s parameters, gradients and optimiser state."""
        return self.model.state_bytes(float(self.parameter_bytes(rank).sum()))

    def sample_bytes(self, rank: int) -> float:
        """Bytes of one sample's activations on `rank`."""
        layers = self.model.layers
        if self.division is None:
            return self.model.whole_sample_bytes
        return self.model.sample_bytes(self.division.kept_bytes(layers, rank), self.division.value_share(rank))

    def _most_samples(self) -> int | None:
        bounds = [
            self.model.most_samples(device, self.state_bytes(rank), self.sample_bytes(rank))
            for rank, device in enumerate(self.devices)
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _copying(self, samples: float, moved: Numbers) -> Numbers:
        """Seconds of every layer in which the slowest rank takes tensors apart and puts them together."""
        devices = [self.model.device(device) for device in self.devices]
        bandwidth = min(device.bandwidth for device in devices)
        start = max(device.pass_seconds for device in devices)
        return samples * moved / bandwidth + start * (moved > 0)

    def _speeds(self) -> tuple[float, ...]:
        units = [self.model.workers[device].unit_seconds for device in self.devices]
        return tuple(min(units) / unit for unit in units)

    def _sent_bytes(self) -> float:
        """Bytes of one sample that the busiest rank sends."""
        assert self.division is not None
        exchanges, size = self.division.exchanges, len(self.devices)
        gathered = exchanges.forward_gather + exchanges.backward_gather
        reduced = exchanges.forward_reduce + exchanges.backward_reduce
        share = max(self.division.shares)
        told = (size - 1) * (share * gathered + 2 / size * reduced)
        return float(told.sum() + 2 * exchanges.halo.sum())


def _told(
    samples: float,
    gathered: Numbers,
    reduced: Numbers,
    halo: Numbers,
    largest: float,
    size: int,
    channel: LinkCost,
    start: float,
) -> Numbers:
    """Seconds of every layer's collectives in one pass; `largest` is the largest rank's share of a gathered tensor."""
    steps = size - 1
    gather = steps * (channel.alpha * (gathered > 0) + samples * gathered * largest * channel.beta)
    reduce = 2 * steps * (channel.alpha * (reduced > 0) + samples * reduced / size * channel.beta)
    strips = channel.alpha * (halo > 0) + samples * halo * channel.beta
    starting = start * ((gathered > 0) * 1.0 + (reduced > 0) + (halo > 0))
    return gather + reduce + strips + starting
