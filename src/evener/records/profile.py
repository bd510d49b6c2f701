"""ClusterProfile: measurements of the machines; made by `benchmark` or written by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from evener.records.errors import require, require_not_negative, require_positive
from evener.records.schema import Finite, Name, Noun, Part, Text, Whole

Precision = Literal["fp64", "fp32", "fp16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "fp16", "bf16")


class Throughput(Part, frozen=True, kw_only=True):
    """Measured speed of one device at one precision, in FLOP/s (a multiply-add counts two).

    Attributes:
        precision: precision of the operands.
        matmul_flops: FLOP/s of a large square matrix product; None where the device cannot do it.
        conv_flops: FLOP/s of a 3x3 convolution; None where the device cannot do it.
        reason: reason why a value is None.
    """

    precision: Precision
    matmul_flops: Finite | None = None
    conv_flops: Finite | None = None
    reason: Text = ""

    def __post_init__(self) -> None:
        for field in ("matmul_flops", "conv_flops"):
            value = getattr(self, field)
            require(value is None or value > 0, field, value, "positive, or null where unsupported")

    @property
    def score(self) -> float | None:
        """The geometric mean of both speeds in GFLOP/s, one comparable number.

        With the geometric mean, doubling either speed counts the same, whichever is faster. None where the device
        cannot do one of the two: it then cannot train a convolutional network at this precision.
        """
        if self.matmul_flops is None or self.conv_flops is None:
            return None
        return math.sqrt(self.matmul_flops) * math.sqrt(self.conv_flops) / 1e9


class BatchTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one pass of a task's model over one batch.

    Attributes:
        samples: samples in the batch.
        forward_seconds: seconds of the forward pass and the loss.
        backward_seconds: seconds of the backward pass.
    """

    samples: Whole
    forward_seconds: Finite
    backward_seconds: Finite

    def __post_init__(self) -> None:
        require(self.samples > 0, "samples", self.samples, "positive")
        require_not_negative(self, "forward_seconds", "backward_seconds")

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward pass together."""
        return self.forward_seconds + self.backward_seconds


class LayerTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one layer: n samples take fixed + n * sample, in each of both passes.

    Attributes:
        layer: name of the layer in the ModelGraph.
        forward_fixed, forward_sample: seconds of the forward pass.
        backward_fixed, backward_sample: seconds of the backward pass.
    """

    layer: Name
    forward_fixed: Finite
    forward_sample: Finite
    backward_fixed: Finite
    backward_sample: Finite

    def __post_init__(self) -> None:
        for field in ("forward_fixed", "forward_sample", "backward_fixed", "backward_sample"):
            require(getattr(self, field) >= 0, field, getattr(self, field), "zero seconds or more")


class TaskTiming(Part, frozen=True, kw_only=True):
    """Measured seconds of one task's model on one device, which decide the shares.

    Attributes:
        task: name of the task.
        precision: precision of the run, `fp32`, `bf16` ...
        batches: timings by increasing number of samples.
        update_seconds: seconds of one optimizer step, whatever the batch.
        max_samples: largest batch that fits the device's memory; None if nothing bounds it.
        layers: seconds of single layers, as far as they were timed.
    """

    task: Name
    precision: Name
    batches: tuple[BatchTiming, ...]
    update_seconds: Finite = 0.0
    max_samples: Whole | None = None
    layers: tuple[LayerTiming, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.batches), "batches", self.batches, "at least one measured batch")
        sizes = [batch.samples for batch in self.batches]
        require(all(a < b for a, b in pairwise(sizes)), "batches", sizes, "in order of increasing samples")
        require(self.max_samples is None or self.max_samples > 0, "max_samples", self.max_samples, "positive or null")
        require(self.update_seconds >= 0, "update_seconds", self.update_seconds, "zero or more")


class WidthEfficiency(Part, frozen=True, kw_only=True):
    """Speed of a convolution of few filters, as a fraction of the speed of a wide one.

    Attributes:
        filters: filters of the convolution, or channels that it reads.
        efficiency: its FLOP/s, relative to those of the widest measured one.
    """

    filters: Whole
    efficiency: Finite

    def __post_init__(self) -> None:
        require(self.filters > 0, "filters", self.filters, "positive")
        require(0 < self.efficiency <= 1, "efficiency", self.efficiency, "above 0, at most 1")


class DeviceProfile(Part, frozen=True, kw_only=True):
    """One device of one node.

    Attributes:
        node: name of the machine.
        device: device, as PyTorch names it.
        model: the maker's name of the device.
        cores: CPU cores or GPU multiprocessors that the rank may use.
        memory_bytes: memory of the device.
        usable_memory_bytes: memory that a training run may take.
        bandwidth: bytes per second that a large copy reads and writes, together.
        throughputs: one per precision.
        speed: 1.0, or the fraction to which a local node is throttled.
        timings: timings of tasks on this device.
        leaf: name of the switch of its node; nodes of one leaf reach each other without the upper levels.
        pass_seconds: seconds to start and end one pass of one layer, however small.
        widths: speed of narrow convolutions, by increasing width; empty if it does not depend on the width.
        learnt: measured by predicted computing seconds of past runs; 1.0 if there were none.
        spread: standard deviation of the speeds of similar devices, as a fraction; 0 if this very one was measured.
        address: address at which other machines reach its node; empty if unknown.
    """

    node: Name
    device: Name
    model: Name
    cores: Whole
    memory_bytes: Whole
    usable_memory_bytes: Whole
    bandwidth: Finite | None = None
    throughputs: tuple[Throughput, ...] = ()
    speed: Finite = 1.0
    timings: tuple[TaskTiming, ...] = ()
    leaf: Name = ""
    pass_seconds: Finite = 0.0
    widths: tuple[WidthEfficiency, ...] = ()
    learnt: Finite = 1.0
    spread: Finite = 0.0
    address: Name = ""

    def __post_init__(self) -> None:
        require(bool(self.node), "node", self.node, "a non-empty name")
        require_positive(self, "cores", "memory_bytes", "speed", "learnt")
        allowed = f"between 1 and memory_bytes ({self.memory_bytes})"
        require(
            0 < self.usable_memory_bytes <= self.memory_bytes, "usable_memory_bytes", self.usable_memory_bytes, allowed
        )
        require(self.bandwidth is None or self.bandwidth > 0, "bandwidth", self.bandwidth, "positive or null")
        require(self.pass_seconds >= 0, "pass_seconds", self.pass_seconds, "zero seconds or more")
        require(0 <= self.spread < 0.3, "spread", self.spread, "from 0 to below 0.3")
        sizes = [width.filters for width in self.widths]
        require(all(a < b for a, b in pairwise(sizes)), "widths", sizes, "in order of increasing filters")

    def throughput(self, precision: str) -> Throughput | None:
        """Return the speeds at `precision`, if they were measured."""
        return next((t for t in self.throughputs if t.precision == precision), None)

    def timing(self, task: str, precision: str) -> TaskTiming | None:
        """Return the timing of `task` at `precision`, if it was measured here."""
        return next((t for t in self.timings if t.task == task and t.precision == precision), None)


class LinkProfile(Part, frozen=True, kw_only=True):
    """Cost of a message between two devices: alpha + bytes * beta seconds.

    Attributes:
        source: index of a device in the profile.
        target: index of the other; links count as symmetric.
        alpha: seconds of latency of a small message, one way.
        beta: seconds per byte of a large one.
        backend: `gloo` or `nccl`.
    """

    source: Whole
    target: Whole
    alpha: Finite
    beta: Finite
    backend: Name = "gloo"

    def __post_init__(self) -> None:
        require(self.source != self.target, "target", self.target, "another device than source")
        require(self.alpha >= 0, "alpha", self.alpha, "zero seconds or more")
        require(self.beta >= 0, "beta", self.beta, "zero seconds per byte or more")


class Fabric(Part, frozen=True, kw_only=True):
    """Cost of messages at one level of a network: inside of nodes, between nodes of a leaf, or between leaves.

    Attributes:
        name: name for the reader, such as `NVLink` or `InfiniBand EDR`.
        within: smallest domain that holds both ends of such a message.
        alpha: seconds of latency of a small message.
        beta: seconds per byte of one large message without other traffic.
        shared_bandwidth: bytes per second, in each direction, shared by all simultaneous messages: within `node`, of
            the node itself; within `leaf`, of the link out of one node; within `cluster`, of the link out of one leaf.
            None if they do not slow each other down.
    """

    name: Name
    within: Literal["node", "leaf", "cluster"]
    alpha: Finite
    beta: Finite
    shared_bandwidth: Finite | None = None

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "alpha", self.alpha, "zero seconds or more")
        require(self.beta >= 0, "beta", self.beta, "zero seconds per byte or more")
        ok = self.shared_bandwidth is None or self.shared_bandwidth > 0
        require(ok, "shared_bandwidth", self.shared_bandwidth, "positive, or null where nothing is shared")


class ClusterProfile(Noun, frozen=True, kw_only=True):
    """All devices, in the order of ranks, and the links between them.

    Attributes:
        devices: devices, at least one.
        links: one per measured pair; a missing pair counts as the worst measured one, unless `fabrics` has it.
        environment: versions and host facts, for the reader.
        fabrics: levels of the network, at most one for each `within`, for clusters too large to measure every pair.
        learnt: measured by predicted seconds of waiting for exchanges in past runs; 1.0 if there were none.
    """

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    environment: dict[Name, Name] = {}
    fabrics: tuple[Fabric, ...] = ()
    learnt: Finite = 1.0

    def __post_init__(self) -> None:
        require(bool(self.devices), "devices", self.devices, "at least one device")
        require(self.learnt > 0, "learnt", self.learnt, "positive")
        levels = [fabric.within for fabric in self.fabrics]
        require(len(set(levels)) == len(levels), "fabrics", levels, "one for each of node, leaf and cluster at most")
        for link in self.links:
            for field, index in (("source", link.source), ("target", link.target)):
                allowed = f"an index of a device, 0 to {len(self.devices) - 1}"
                require(0 <= index < len(self.devices), f"links: {field}", index, allowed)
