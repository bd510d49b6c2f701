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
from evener.oracle.cost.partition import Mode, ModelSplit, PassExchanges
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
        self.division: ModelSplit | None = None
        if mode != "none" and len(self.devices) > 1:
            self.division = model.divide(mode, self.shares)
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
        return self.division.parameter_bytes(rank) if self.division else self.model.layers.weight_bytes

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
        passes = (self.division.forward, self.division.backward)
        exchanged = [self._exchanging(samples, one) for one in passes]
        copied = [self._copying(samples, one.copied) for one in passes]
        return ReplicaStep(
            forward=forward + exchanged[0] + copied[0],
            backward=backward + exchanged[1] + copied[1],
            computing=computing + float(copied[0].sum() + copied[1].sum()),
            exchanging=float(exchanged[0].sum() + exchanged[1].sum()),
            sent_bytes=samples * float(self.division.sent_bytes.max()),
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
        if self.division is None:
            return self.model.whole_sample_bytes
        return self.model.sample_bytes(self.division.kept_bytes(rank), self.division.value_share(rank))

    def _most_samples(self) -> int | None:
        bounds = [
            self.model.most_samples(device, self.state_bytes(rank), self.sample_bytes(rank))
            for rank, device in enumerate(self.devices)
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _exchanging(self, samples: float, one: PassExchanges) -> Numbers:
        """Seconds of every layer's collectives in one pass."""
        start = max(self.model.device(device).pass_seconds for device in self.devices)
        sending = self._channel.alpha * one.messages + samples * one.nbytes * self._channel.beta
        return sending + start * one.collectives

    def _copying(self, samples: float, moved: Numbers) -> Numbers:
        """Seconds of every layer in which the slowest rank takes tensors apart and puts them together."""
        devices = [self.model.device(device) for device in self.devices]
        bandwidth = min(device.bandwidth for device in devices)
        start = max(device.pass_seconds for device in devices)
        return samples * moved / bandwidth + start * (moved > 0)

    def _speeds(self) -> tuple[float, ...]:
        units = [self.model.workers[device].unit_seconds for device in self.devices]
        return tuple(min(units) / unit for unit in units)
