"""A job on given machines: what the forecasts of all strategies start from, ask again and again, and come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log2
from statistics import NormalDist
from typing import TypedDict

import numpy as np

from evener.oracle.apportion import Worker
from evener.oracle.cost.layers import Layers, Numbers, columns
from evener.oracle.cost.partition import DividedLayers, ModelSplit
from evener.oracle.cost.roofline import DeviceSpeed, LayerSeconds, device_of, layer_seconds
from evener.oracle.cost.topology import Topology
from evener.oracle.division.layout import Replica
from evener.oracle.division.rules import Division
from evener.records.errors import require, require_one_of
from evener.records.graph import Layer, ModelGraph
from evener.records.plan import Strategy
from evener.records.profile import ClusterProfile, Precision

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers that an optimiser keeps for every parameter."""
_MOST_UNITS = 128
_MANY_RANKS = 1 << 31
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
"""Of an activation; parameters keep the size that the graph gives them."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is to be trained.

    Attributes:
        graph: of the model.
        batch_size: samples of one optimiser step, over all devices.
        optimizer: `sgd`, `momentum` or `adam`: what it keeps for every parameter.
        precision: of the arithmetic.
        task: name under which timings are looked for in the profile.
        overlap: whether gradients are exchanged while the backward pass goes on.
        statistics: whether BatchNorm is that of all samples, and exchanges its statistics.
        published: whether models are divided as Kahira et al. 2021 did it, and not as Evener does: linear layers are
            never divided, nor channels that are fewer than ranks; every layer exchanges the gradient of its input by
            itself, even if others have read it, too; with strips, all gradients are added up over all ranks.
        bucket_bytes: of gradients that are exchanged together.
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

    def __post_init__(self) -> None:
        require(self.batch_size > 0, "--batch-size", self.batch_size, "positive")
        require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        require(self.bucket_bytes > 0, "bucket_bytes", self.bucket_bytes, "positive")


class CostModel:
    """`job` on the machines of `profile`; devices are named by their index in it.

    Args:
        job: what to train.
        profile: the machines.

    Raises:
        InvalidValue: a device can neither be looked up nor computed: it has no timing of the task and no speed.
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
        self._divided: dict[tuple[Division, int], DividedLayers] = {}

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.kinds)

    def device(self, index: int) -> DeviceSpeed:
        """What device `index` can do."""
        return self._devices[self.kinds[index]]

    def name(self, index: int) -> str:
        """Device `index` in words."""
        one = self.profile.devices[index]
        return f"{one.node} {one.device}"

    def seconds(self, index: int) -> LayerSeconds:
        """Seconds of every layer on device `index`."""
        kind = self.kinds[index]
        if kind not in self._seconds:
            self._seconds[kind] = layer_seconds(self.layers, [self._devices[kind]])
        return self._seconds[kind]

    def divide(self, mode: Division, shares: Sequence[float]) -> ModelSplit:
        """What ranks with `shares` of the work do of every layer if they divide the model by `mode`."""
        published, size = self.job.published, 2
        if mode == "hybrid" or published:  # only which layers have a channel for every rank counts
            size = int(self.layers.channels.min(where=self.layers.channels >= len(shares), initial=_MANY_RANKS))
        if (mode, size) not in self._divided:
            self._divided[mode, size] = DividedLayers(self.layers, mode, size, published)
        return self._divided[mode, size].among(Replica(shares=tuple(shares)))

    def update_seconds(self, index: int, parameter_bytes: float) -> float:
        """Seconds of the optimiser's step over `parameter_bytes` on device `index`.

        It reads parameter and gradient and writes the parameter; reads and writes what it keeps.
        """
        device, whole = self.device(index), self.parameter_bytes
        if device.timing is not None and whole:
            return device.timing.update_seconds * parameter_bytes / whole * device.learnt
        passes = 3 + 2 * OPTIMIZERS[self.job.optimizer]
        return passes * parameter_bytes / device.bandwidth * device.learnt

    def state_bytes(self, parameter_bytes: float) -> float:
        """Bytes of parameters, their gradients and what the optimiser keeps, with the model's buffers."""
        return parameter_bytes * (2 + OPTIMIZERS[self.job.optimizer]) + self.job.graph.buffer_bytes

    @cached_property
    def layer_state_bytes(self) -> Numbers:
        """Bytes of every layer's parameters, gradients and optimiser state."""
        return self.layers.weight_bytes * (2 + OPTIMIZERS[self.job.optimizer])

    def sample_bytes(self, kept: Numbers, share: Numbers) -> Numbers:
        """Bytes of one sample on every rank: what is kept for backward, and the largest layer's tensors meanwhile.

        Args:
            kept: of every layer, [ranks, layers].
            share: of the layers' values, likewise.
        """
        passing = (self.layers.input_bytes + self.layers.output_bytes) * share
        found: Numbers = kept.sum(axis=1) + 2 * passing.max(axis=1)
        return found

    def most_samples(self, index: int, state_bytes: float, sample_bytes: float) -> int | None:
        """Samples that device `index` can hold at once; None if nothing bounds them."""
        device = self.device(index)
        measured = device.timing.max_samples if device.timing else None
        if device.memory_bytes >= 1 << 62:
            return measured
        fitting = max(0, int((device.memory_bytes - state_bytes) // max(1.0, sample_bytes)))
        return fitting if measured is None else min(fitting, measured)

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """What a step of n samples of the whole model costs every device by itself."""
        by_kind: dict[int, Worker] = {}
        for index, kind in enumerate(self.kinds):
            if kind not in by_kind:
                seconds = self.seconds(index)
                by_kind[kind] = Worker(
                    unit_seconds=max(float(seconds.each.sum()), 1e-12),
                    fixed_seconds=float(seconds.fixed.sum()) + self.update_seconds(index, self.parameter_bytes),
                    most=self.most_samples(index, self.whole_state_bytes, self.whole_sample_bytes),
                )
        return tuple(by_kind[kind] for kind in self.kinds)

    @cached_property
    def whole_state_bytes(self) -> float:
        """`state_bytes` of the whole model."""
        return self.state_bytes(self.parameter_bytes)

    @cached_property
    def whole_sample_bytes(self) -> float:
        """`sample_bytes` of the whole model."""
        return float(self.sample_bytes(self.layers.kept_bytes[None], np.ones((1, len(self.layers))))[0])

    @cached_property
    def units(self) -> list[int]:
        """First layers of the units that pipelines are cut into: neighbours of the least seconds are put together."""
        fastest = min(range(self.size), key=lambda device: self.workers[device].unit_seconds)
        sums: list[float] = self.seconds(fastest).each.sum(axis=(0, 1)).tolist()
        starts = list(range(len(sums)))
        while len(starts) > _MOST_UNITS:
            least = min(range(len(sums) - 1), key=lambda i: sums[i] + sums[i + 1])
            sums[least] += sums.pop(least + 1)
            starts.pop(least + 1)
        return starts

    def statistics_seconds(self, devices: Sequence[int]) -> float:
        """Seconds that BatchNorm's exchanges take among `devices`: one small message a layer and pass."""
        if len(devices) < 2 or not self.job.statistics:
            return 0.0
        rounds = ceil(log2(len(devices))) * self.topology.ring(devices).alpha
        return 2 * len(self._norms) * rounds

    def stretch(self, devices: Sequence[int]) -> float:
        """How much longer than an average device the slowest of `devices` takes, that are alike but for their spread.

        The expected greatest of p normal deviates by Blom (1958): the quantile of (p - 3/8) / (p + 1/4).
        """
        spread, size = max(self.profile.devices[device].spread for device in devices), len(devices)
        return 1 + spread * NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 and spread else 1.0

    @cached_property
    def statistics_bytes(self) -> int:
        """Bytes that a rank tells each other one: mean, variance and count forward, two sums backward, in 32 bits."""
        return 4 * sum(4 * layer.output_shape[0] + 1 for layer in self._norms) if self.job.statistics else 0

    @cached_property
    def _norms(self) -> list[Layer]:
        return [layer for layer in self.job.graph.layers if "BatchNorm" in layer.kind]


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """One way to do a step, with its price.

    Attributes:
        strategy: how the work is divided.
        devices: in the order of ranks, by their index in the profile.
        replicas: of every rank: the number of the whole model that it is a part of.
        samples: of every rank in a full micro-batch: those of its replica.
        shares: of every rank: the fraction of its replica's model, rows or layers that it does.
        accumulate: micro-batches of a step, one after the other (in a pipeline: behind each other).
        local_steps: of each replica between two exchanges; 1 if they agree after every step.
        stages: of a pipeline: number of the first layer of every stage.
        members: of a pipeline: devices that divide the layers of each stage.
        compute_seconds: of the rank that computes longest, its update included.
        communication_seconds: in which ranks exchange and cannot compute meanwhile.
        waiting_seconds: of the busiest rank for others: what is left of the step.
        sent_bytes: of the rank that sends most.
        memory_bytes: of every rank, at its peak.
        bottleneck: what takes longest, in words.
        rejected: why it cannot or should not run, in words; empty if it can.
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
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float = 0.0
    sent_bytes: int = 0
    memory_bytes: tuple[int, ...] = field(default=(), repr=False)
    bottleneck: str = ""
    rejected: str = ""

    @property
    def step_seconds(self) -> float:
        """Of one step of the whole batch."""
        return self.compute_seconds + self.communication_seconds + self.waiting_seconds

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(self.memory_bytes, default=0)


class Ranks(TypedDict):
    """Who does what, rank by rank: fields of a `CostEstimate`."""

    devices: tuple[int, ...]
    replicas: tuple[int, ...]
    samples: tuple[int, ...]


def ranks_of(groups: Sequence[Sequence[int]], samples: Sequence[int]) -> Ranks:
    """The ranks of groups of devices, each of which holds one model and takes its number of `samples`."""
    return {
        "devices": tuple(device for group in groups for device in group),
        "replicas": tuple(index for index, group in enumerate(groups) for _ in group),
        "samples": tuple(n for n, group in zip(samples, groups, strict=True) for _ in group),
    }


def worst_of(parts: Sequence[tuple[float, str]]) -> str:
    """The words of the part that takes longest."""
    return max(parts, key=lambda part: part[0])[1]
