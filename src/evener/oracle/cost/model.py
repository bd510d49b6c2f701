"""A training job on given machines, from which all strategies are priced, and the estimate that they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log2
from statistics import NormalDist
from typing import Literal, TypedDict

import numpy as np

from evener.oracle.apportion import NodeCost
from evener.oracle.cost.layers import Layers, Numbers, columns
from evener.oracle.cost.partition import DividedLayers, ModelSplit
from evener.oracle.cost.roofline import DeviceSpeed, LayerSeconds, device_of, layer_seconds
from evener.oracle.cost.step_breakdown import StepBreakdown
from evener.oracle.cost.topology import Topology
from evener.oracle.division.layout import Replica
from evener.oracle.division.rules import DivisionName
from evener.oracle.schedule import ScheduleChoice, ScheduleName
from evener.records.errors import require, require_one_of
from evener.records.graph import Layer, ModelGraph
from evener.records.plan import Strategy
from evener.records.profile import ClusterProfile, Precision

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers that each optimizer keeps for every parameter."""
_MAX_UNITS = 128
_MANY_RANKS = 1 << 31
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an activation; parameters keep the size that the graph states."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model and how it is trained.

    Attributes:
        graph: the model.
        batch_size: samples of one optimizer step, over all devices.
        optimizer: `sgd`, `momentum` or `adam`; it determines the state kept for every parameter.
        precision: precision of the arithmetic.
        task: name under which the profile holds timings.
        overlap: whether gradients are exchanged during the backward pass.
        statistics: whether BatchNorm uses the statistics of all samples and exchanges them.
        published: whether models are divided as in Kahira et al. 2021, not as Evener does. Linear layers, and channels
            that are fewer than ranks, are then not divided. Every layer exchanges the gradient of its input by itself,
            even if other layers read the same input. With strips, all gradients are summed over all ranks.
        bucket_bytes: size of a bucket of gradients that are exchanged together.
        schedule: order of the passes of pipelines.
    """

    graph: ModelGraph
    batch_size: int
    optimizer: str = "momentum"
    precision: Precision = "fp32"
    task: str = ""
    overlap: bool = True
    statistics: bool = True
    published: bool = False
    bucket_bytes: int = 25 * 2**20
    schedule: ScheduleChoice = "auto"

    def __post_init__(self) -> None:
        require(self.batch_size > 0, "--batch-size", self.batch_size, "positive")
        require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        require(self.bucket_bytes > 0, "bucket_bytes", self.bucket_bytes, "positive")


class CostModel:
    """`job` on the machines of `profile`; devices are named by their index in the profile.

    Args:
        job: what to train.
        profile: the machines.

    Raises:
        InvalidValue: a device has neither a timing of the task nor a speed from which to compute one.
    """

    def __init__(self, job: TrainingJob, profile: ClusterProfile) -> None:
        self.job = job
        self.profile = profile
        self.layers: Layers = columns(job.graph, _ELEMENT_BYTES[job.precision])
        self.parameter_bytes = job.graph.parameter_bytes
        self.topology = Topology(profile)
        kinds: dict[DeviceSpeed, int] = {}
        self.kinds = [kinds.setdefault(device_of(d, job.task, job.precision), len(kinds)) for d in profile.devices]
        self._devices = list(kinds)
        self._seconds: dict[int, LayerSeconds] = {}
        self._divided: dict[tuple[DivisionName, int], DividedLayers] = {}

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.kinds)

    def device(self, index: int) -> DeviceSpeed:
        """Return the speed of device `index`."""
        return self._devices[self.kinds[index]]

    def name(self, index: int) -> str:
        """Return the node and device name of device `index`."""
        device = self.profile.devices[index]
        return f"{device.node} {device.device}"

    def seconds(self, index: int) -> LayerSeconds:
        """Return the seconds of every layer on device `index`."""
        kind = self.kinds[index]
        if kind not in self._seconds:
            self._seconds[kind] = layer_seconds(self.layers, [self._devices[kind]])
        return self._seconds[kind]

    def divide(self, mode: DivisionName, shares: Sequence[float]) -> ModelSplit:
        """Return what ranks with `shares` of the work do of every layer if they divide the model by `mode`."""
        published, size = self.job.published, 2
        if mode == "hybrid" or published:  # the result depends only on which layers have a channel for every rank
            size = int(self.layers.channels.min(where=self.layers.channels >= len(shares), initial=_MANY_RANKS))
        if (mode, size) not in self._divided:
            self._divided[mode, size] = DividedLayers(self.layers, mode, size, published)
        return self._divided[mode, size].among(Replica(shares=tuple(shares)))

    def update_seconds(self, index: int, parameter_bytes: float) -> float:
        """Return the seconds of the optimizer's step over `parameter_bytes` on device `index`.

        The optimizer reads parameter and gradient, writes the parameter, and reads and writes its state.
        """
        device, model_bytes = self.device(index), self.parameter_bytes
        if device.timing is not None and model_bytes:
            return device.timing.update_seconds * parameter_bytes / model_bytes * device.learnt
        passes = 3 + 2 * OPTIMIZERS[self.job.optimizer]
        return passes * parameter_bytes / device.bandwidth * device.learnt

    def state_bytes(self, parameter_bytes: float) -> float:
        """Return the bytes of parameters, their gradients, their optimizer state, and the model's buffers."""
        return parameter_bytes * (2 + OPTIMIZERS[self.job.optimizer]) + self.job.graph.buffer_bytes

    @cached_property
    def layer_state_bytes(self) -> Numbers:
        """Bytes of every layer's parameters, gradients and optimizer state."""
        return self.layers.weight_bytes * (2 + OPTIMIZERS[self.job.optimizer])

    def sample_bytes(self, kept_bytes: Numbers, share: Numbers) -> Numbers:
        """Return the bytes of one sample on every rank, at the layer where they are most.

        That layer's input and output pass, or their gradients, while what it and the layers before it have kept for
        backward is there.

        Args:
            kept: bytes kept of every layer, [ranks, layers].
            share: fraction of each layer's values, [ranks, layers].
        """
        passing = (self.layers.input_bytes + self.layers.output_bytes) * share
        nbytes: Numbers = (kept_bytes.cumsum(axis=1) + passing).max(axis=1)
        return nbytes

    def max_samples(self, index: int, state_bytes: float, sample_bytes: float) -> int | None:
        """Return the samples that device `index` can hold at once; None for no limit."""
        device = self.device(index)
        measured = device.timing.max_samples if device.timing else None
        if device.memory_bytes >= 1 << 62:
            return measured
        fitting = max(0, int((device.memory_bytes - state_bytes) // max(1.0, sample_bytes)))
        return fitting if measured is None else min(fitting, measured)

    @cached_property
    def workers(self) -> tuple[NodeCost, ...]:
        """The cost of a step of n samples of the complete model on each device alone."""
        by_kind: dict[int, NodeCost] = {}
        for index, kind in enumerate(self.kinds):
            if kind not in by_kind:
                seconds = self.seconds(index)
                by_kind[kind] = NodeCost(
                    unit_seconds=max(float(seconds.each.sum()), 1e-12),
                    fixed_seconds=float(seconds.fixed.sum()) + self.update_seconds(index, self.parameter_bytes),
                    max_units=self.max_samples(index, self.whole_state_bytes, self.whole_sample_bytes),
                )
        return tuple(by_kind[kind] for kind in self.kinds)

    @cached_property
    def whole_state_bytes(self) -> float:
        """`state_bytes` of the complete model."""
        return self.state_bytes(self.parameter_bytes)

    @cached_property
    def whole_sample_bytes(self) -> float:
        """`sample_bytes` of the complete model."""
        return float(self.sample_bytes(self.layers.kept_bytes[None], np.ones((1, len(self.layers))))[0])

    @cached_property
    def units(self) -> list[int]:
        """The first layer of each unit that pipelines are cut into; the shortest neighbouring layers are merged into
        units.
        """
        fastest = min(range(self.size), key=lambda device: self.workers[device].unit_seconds)
        sums: list[float] = self.seconds(fastest).each.sum(axis=(0, 1)).tolist()
        starts = list(range(len(sums)))
        while len(starts) > _MAX_UNITS:
            shortest = min(range(len(sums) - 1), key=lambda i: sums[i] + sums[i + 1])
            sums[shortest] += sums.pop(shortest + 1)
            starts.pop(shortest + 1)
        return starts

    def statistics_seconds(self, devices: Sequence[int]) -> float:
        """Return the seconds of BatchNorm's exchanges among `devices`: one small message per layer and pass."""
        if len(devices) < 2 or not self.job.statistics:
            return 0.0
        rounds = ceil(log2(len(devices))) * self.topology.ring(devices).alpha
        return 2 * len(self._norms) * rounds

    def stretch(self, devices: Sequence[int]) -> float:
        """Return the ratio of the slowest to the mean time of `devices` that are equal except for their spread.

        The expected maximum of p normal deviates is the quantile of (p - 3/8) / (p + 1/4), by Blom (1958).
        """
        spread, size = max(self.profile.devices[device].spread for device in devices), len(devices)
        return 1 + spread * NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 and spread else 1.0

    @cached_property
    def statistics_bytes(self) -> int:
        """Bytes that a rank sends to each other rank: mean, variance and count forward, two sums backward, 32 bits
        each.
        """
        return 4 * sum(4 * layer.output_shape[0] + 1 for layer in self._norms) if self.job.statistics else 0

    @cached_property
    def _norms(self) -> list[Layer]:
        return [layer for layer in self.job.graph.layers if "BatchNorm" in layer.kind]


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """The price of one way to perform a step.

    Attributes:
        strategy: how the work is divided.
        devices: in order of ranks, by their index in the profile.
        replicas: number of the replica of each rank.
        samples: samples of each rank's replica in a full micro-batch.
        shares: fraction of its replica's model, rows or layers that each rank does.
        accumulate: consecutive micro-batches of a step (in a pipeline they overlap).
        local_steps: steps of each replica between two exchanges; 1 if they synchronise after every step.
        stages: number of the first layer of every stage of a pipeline.
        members: devices that divide the layers of each stage of a pipeline.
        schedule: order of the passes of a pipeline; empty for others.
        parts: what takes the time of a step.
        sent_bytes: of the rank that sends most.
        memory_bytes: peak memory of each rank.
        bottleneck: what takes longest, as a phrase for the user.
        rejected: why it cannot or should not run, as a phrase for the user; empty if it can.
    """

    strategy: Strategy
    devices: tuple[int, ...]
    replicas: tuple[int, ...]
    samples: tuple[int, ...]
    shares: tuple[float, ...]
    accumulate: int = 1
    local_steps: int = 1
    stages: tuple[int, ...] = ()
    members: int = 1
    schedule: ScheduleName | Literal[""] = ""
    parts: StepBreakdown
    sent_bytes: int = 0
    memory_bytes: tuple[int, ...] = field(default=(), repr=False)
    bottleneck: str = ""
    rejected: str = ""

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the full batch."""
        return self.compute_seconds + self.communication_seconds + self.waiting_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of the rank that computes longest, including the optimizer's update."""
        return self.parts.compute_seconds

    @property
    def communication_seconds(self) -> float:
        """Seconds in which ranks exchange and cannot compute."""
        return self.parts.communication_seconds

    @property
    def waiting_seconds(self) -> float:
        """The remaining seconds of a step, in which the busiest rank waits for others."""
        return self.parts.waiting_seconds

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs most."""
        return max(self.memory_bytes, default=0)


class Ranks(TypedDict):
    """Fields of a `CostEstimate` that say what each rank holds."""

    devices: tuple[int, ...]
    replicas: tuple[int, ...]
    samples: tuple[int, ...]


def ranks_of(groups: Sequence[Sequence[int]], samples: Sequence[int]) -> Ranks:
    """Return the ranks of groups of devices, each of which holds one model and takes its number of `samples`."""
    return {
        "devices": tuple(device for group in groups for device in group),
        "replicas": tuple(index for index, group in enumerate(groups) for _ in group),
        "samples": tuple(n for n, group in zip(samples, groups, strict=True) for _ in group),
    }
