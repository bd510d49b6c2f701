"""ClusterProfile: what the machines are, measured; made by `benchmark` or written by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from evener.errors import require
from evener.noun import Noun, Part

Precision = Literal["fp64", "fp32", "fp16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "fp16", "bf16")


class Throughput(Part, frozen=True, kw_only=True):
    """Measured speed of one device at one precision, in FLOP/s (a multiply-add counts two).

    Attributes:
        precision: of the operands.
        matmul_flops: of a large square matrix product; None where the device cannot do it.
        conv_flops: of a 3x3 convolution; None where the device cannot do it.
        reason: why a value is None.
    """

    precision: Precision
    matmul_flops: float | None = None
    conv_flops: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for field in ("matmul_flops", "conv_flops"):
            value = getattr(self, field)
            require(value is None or value > 0, field, value, "positive, or null where unsupported")

    @property
    def score(self) -> float | None:
        """One comparable number: the geometric mean of both speeds, in GFLOP/s.

        The geometric mean, because twice the speed in either is then worth the same, whichever is faster. None where
        the device cannot do one of the two: it then cannot train a convolutional network at this precision.
        """
        if self.matmul_flops is None or self.conv_flops is None:
            return None
        return math.sqrt(self.matmul_flops) * math.sqrt(self.conv_flops) / 1e9


class BatchTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one pass of a task's model over one batch.

    Attributes:
        samples: in the batch.
        forward_seconds: of the forward pass and the loss.
        backward_seconds: of the backward pass.
    """

    samples: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        require(self.samples > 0, "samples", self.samples, "positive")
        require(self.forward_seconds >= 0, "forward_seconds", self.forward_seconds, "zero or more")
        require(self.backward_seconds >= 0, "backward_seconds", self.backward_seconds, "zero or more")

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


class TaskTiming(Part, frozen=True, kw_only=True):
    """How long one task's model takes on one device: what decides the shares.

    Attributes:
        task: name of the task.
        precision: of the run, `fp32`, `bf16` ...
        batches: measured, by increasing number of samples.
        update_seconds: of one optimiser step, whatever the batch.
        max_samples: largest batch that fits the device's memory; None if nothing bounds it.
    """

    task: str
    precision: str
    batches: tuple[BatchTiming, ...]
    update_seconds: float = 0.0
    max_samples: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.batches), "batches", self.batches, "at least one measured batch")
        sizes = [batch.samples for batch in self.batches]
        require(all(a < b for a, b in pairwise(sizes)), "batches", sizes, "in order of increasing samples")
        require(self.max_samples is None or self.max_samples > 0, "max_samples", self.max_samples, "positive or null")
        require(self.update_seconds >= 0, "update_seconds", self.update_seconds, "zero or more")


class DeviceProfile(Part, frozen=True, kw_only=True):
    """One device of one node.

    Attributes:
        node: name of the machine.
        device: as PyTorch names it, `cpu` or `cuda:0`.
        model: what the maker calls it.
        cores: processor cores (CPU) or multiprocessors (GPU) that the rank may use.
        memory_bytes: of the device.
        usable_memory_bytes: that a training run may take.
        bandwidth: bytes per second that a large copy reads and writes, together.
        throughputs: one a precision.
        speed: 1.0, or the fraction to which a local node was slowed down on purpose.
        timings: of tasks measured on this device.
    """

    node: str
    device: str
    model: str
    cores: int
    memory_bytes: int
    usable_memory_bytes: int
    bandwidth: float | None = None
    throughputs: tuple[Throughput, ...] = ()
    speed: float = 1.0
    timings: tuple[TaskTiming, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.node), "node", self.node, "a non-empty name")
        require(self.cores > 0, "cores", self.cores, "positive")
        require(self.memory_bytes > 0, "memory_bytes", self.memory_bytes, "positive")
        allowed = f"between 1 and memory_bytes ({self.memory_bytes})"
        require(
            0 < self.usable_memory_bytes <= self.memory_bytes, "usable_memory_bytes", self.usable_memory_bytes, allowed
        )
        require(self.bandwidth is None or self.bandwidth > 0, "bandwidth", self.bandwidth, "positive or null")
        require(self.speed > 0, "speed", self.speed, "positive")

    def timing(self, task: str, precision: str) -> TaskTiming | None:
        """The timing of `task` at `precision`, if it was measured here."""
        return next((t for t in self.timings if t.task == task and t.precision == precision), None)


class LinkProfile(Part, frozen=True, kw_only=True):
    """What a message between two devices costs: alpha + bytes * beta seconds.

    Attributes:
        source: index of a device in the profile.
        target: index of the other; links are taken as symmetric.
        alpha: seconds of latency of a small message, one way.
        beta: seconds per byte of a large one.
        backend: `gloo` or `nccl`.
    """

    source: int
    target: int
    alpha: float
    beta: float
    backend: str = "gloo"

    def __post_init__(self) -> None:
        require(self.source != self.target, "target", self.target, "another device than source")
        require(self.alpha >= 0, "alpha", self.alpha, "zero seconds or more")
        require(self.beta >= 0, "beta", self.beta, "zero seconds per byte or more")


class ClusterProfile(Noun, frozen=True, kw_only=True):
    """All devices, in the order of ranks, and the links between them.

    Attributes:
        devices: at least one.
        links: one a measured pair; a missing pair is taken to be like the worst measured one.
        environment: versions and host facts, for the reader.
    """

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        require(bool(self.devices), "devices", self.devices, "at least one device")
        for link in self.links:
            for field, index in (("source", link.source), ("target", link.target)):
                allowed = f"an index of a device, 0 to {len(self.devices) - 1}"
                require(0 <= index < len(self.devices), f"links: {field}", index, allowed)
