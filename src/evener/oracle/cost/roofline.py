"""Seconds of every layer on a device: measured where they are known, by roofline from benchmark scores otherwise.

Roofline (Williams, Waterman & Patterson 2009) of one pass of a layer over n samples:

    seconds = pass_seconds + weights / bandwidth + n max(FLOPs / (speed e), bytes / bandwidth)

speed: measured FLOP/s of a matrix product (linear layers) or of a convolution. e: efficiency of narrow operations,
measured by width. What it depends on, of F filters and C channels with k taps each:

    forward                      F                 the filters are a dim of the product
    gradient of the input        C                 the channels are
    gradient of the weights      min(F, C k)       both are

If the device was timed with the whole task, the passes are scaled so that their sums are the measured ones; a layer
that was timed by itself has its own seconds. Of measured seconds, a part costs its part of those for each sample, but
all of those whatever the samples: starting a pass does not get quicker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from evener.errors import InvalidValue
from evener.oracle.cost.layers import Layers, Numbers
from evener.profile import DeviceProfile, TaskTiming

_CLOCK_RESOLUTION = 1e-9


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """What a rank does of every layer, as fractions of the whole: columns of numbers between 0 and 1."""

    filters: Numbers
    channels: Numbers
    rows: Numbers

    @property
    def key(self) -> bytes:
        """The same for equal parts."""
        return b"".join(column.tobytes() for column in (self.filters, self.channels, self.rows))


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of all layers, each pass: fixed + n * each for n samples."""

    forward_fixed: Numbers
    forward_each: Numbers
    backward_fixed: Numbers
    backward_each: Numbers

    def forward(self, samples: float) -> Numbers:
        """Seconds of every layer's forward pass."""
        return self.forward_fixed + samples * self.forward_each

    def backward(self, samples: float) -> Numbers:
        """Seconds of every layer's backward pass."""
        return self.backward_fixed + samples * self.backward_each

    @property
    def fixed(self) -> float:
        """Seconds of both passes of all layers, whatever the number of samples."""
        return float(self.forward_fixed.sum() + self.backward_fixed.sum())

    @property
    def each(self) -> float:
        """Seconds of both passes of all layers for each sample."""
        return float(self.forward_each.sum() + self.backward_each.sum())


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """A device as the oracle sees it.

    Attributes:
        conv_flops, matmul_flops: FLOP/s of wide operations.
        bandwidth: bytes per second, read and written together.
        pass_seconds: of starting and ending a pass of a layer.
        widths: (filters, efficiency) by increasing filters; empty if narrow operations are as fast as wide ones.
        memory_bytes: that a run may take.
        timing: of the task, if it was measured here.
        learnt: measured by predicted seconds of past runs.
    """

    conv_flops: float
    matmul_flops: float
    bandwidth: float
    pass_seconds: float = 0.0
    widths: tuple[tuple[int, float], ...] = ()
    memory_bytes: int = 1 << 62
    timing: TaskTiming | None = None
    learnt: float = 1.0

    def efficiency(self, widths: Numbers) -> Numbers:
        """Speed of operations of these widths, as a fraction of that of wide ones; interpolated on a log scale."""
        if not self.widths:
            return np.ones_like(widths)
        known = np.array([width for width, _ in self.widths], dtype=np.float64)
        values = np.array([efficiency for _, efficiency in self.widths])
        logarithm: Numbers = np.interp(np.log(np.maximum(widths, 1.0)), np.log(known), np.log(values))
        return np.exp(logarithm)


def device_of(profile: DeviceProfile, task: str, precision: str) -> DeviceSpeed:
    """What is known of a device at `precision`, and of `task` on it.

    Raises:
        InvalidValue: a device without a timing of the task has no speed at this precision, or no bandwidth.
    """
    timing = profile.timing(task, precision)
    throughput = profile.throughput(precision)
    conv = throughput.conv_flops if throughput else None
    matmul = throughput.matmul_flops if throughput else None
    where = f"of {profile.node} {profile.device}"
    if timing is None and (conv is None or matmul is None):
        raise InvalidValue(
            f"throughputs {where}", None, f"measured at {precision}, or {task or 'the task'} timed there"
        )
    if timing is None and profile.bandwidth is None:
        raise InvalidValue(f"bandwidth {where}", None, f"measured, or {task or 'the task'} timed there")
    return DeviceSpeed(
        conv_flops=conv or matmul or 1e12,
        matmul_flops=matmul or conv or 1e12,
        bandwidth=profile.bandwidth or (matmul or 1e12) / 10,
        pass_seconds=profile.pass_seconds,
        widths=tuple((width.filters, width.efficiency) for width in profile.widths),
        memory_bytes=profile.usable_memory_bytes,
        timing=timing,
        learnt=profile.learnt,
    )


def whole(layers: Layers) -> LayerShare:
    """The part of a rank that does all of every layer."""
    ones = np.ones(len(layers))
    return LayerShare(filters=ones, channels=ones, rows=ones)


def layer_seconds(layers: Layers, device: DeviceSpeed, part: LayerShare | None = None) -> LayerSeconds:
    """Seconds of `part` of every layer on `device`; of all by default."""
    if device.timing is None:
        return _scaled(roofline(layers, device, part or whole(layers)), device.learnt)
    plain = roofline(layers, device, whole(layers))
    full = _scaled(_timed_alone(layers, device.timing, _timed_together(plain, device.timing)), device.learnt)
    if part is None:
        return full
    own = roofline(layers, device, part)
    return LayerSeconds(
        forward_fixed=full.forward_fixed,
        forward_each=full.forward_each * _ratio(own.forward_each, plain.forward_each),
        backward_fixed=full.backward_fixed,
        backward_each=full.backward_each * _ratio(own.backward_each, plain.backward_each),
    )


def roofline(layers: Layers, device: DeviceSpeed, part: LayerShare) -> LayerSeconds:
    """Seconds of `part` of every layer, from the device's scores alone."""
    speed = np.where(layers.is_convolution, device.conv_flops, device.matmul_flops)
    filters, channels = layers.filters * part.filters, layers.channels * part.channels
    weights = layers.weight_bytes * part.filters * part.channels / device.bandwidth
    share = part.filters * part.channels * part.rows

    def scale(width: Numbers) -> Numbers:
        return np.where(layers.is_weighted, device.efficiency(width), 1.0)

    forward = layers.forward_flops * share / (speed * scale(filters))
    weight_gradient = layers.forward_flops * share / (speed * scale(np.minimum(filters, channels * layers.taps)))
    input_gradient = (layers.backward_flops - layers.forward_flops) * share / (speed * scale(channels))
    inputs, outputs = part.channels * part.rows, part.filters * part.rows
    moved_forward = (layers.forward_in * inputs + layers.forward_out * outputs) / device.bandwidth
    moved_backward = (layers.backward_in * inputs + layers.backward_out * outputs) / device.bandwidth
    return LayerSeconds(
        forward_fixed=device.pass_seconds + weights,
        forward_each=np.maximum(forward, moved_forward),
        backward_fixed=device.pass_seconds + 2 * weights,
        backward_each=np.maximum(weight_gradient + input_gradient, moved_backward),
    )


def _scaled(seconds: LayerSeconds, factor: float) -> LayerSeconds:
    return LayerSeconds(
        forward_fixed=seconds.forward_fixed * factor,
        forward_each=seconds.forward_each * factor,
        backward_fixed=seconds.backward_fixed * factor,
        backward_each=seconds.backward_each * factor,
    )


def _timed_together(seconds: LayerSeconds, timing: TaskTiming) -> LayerSeconds:
    """Every pass scaled so that its sum over layers is the measured one."""
    forward = fit_line((batch.samples, batch.forward_seconds) for batch in timing.batches)
    backward = fit_line((batch.samples, batch.backward_seconds) for batch in timing.batches)
    return LayerSeconds(
        forward_fixed=_summing_to(forward[0], seconds.forward_fixed),
        forward_each=_summing_to(forward[1], seconds.forward_each),
        backward_fixed=_summing_to(backward[0], seconds.backward_fixed),
        backward_each=_summing_to(backward[1], seconds.backward_each),
    )


def _summing_to(total: float, values: Numbers) -> Numbers:
    """`values` in the same proportions with another sum; equal ones if they have none."""
    return values * (total / values.sum()) if values.sum() > 0 else np.full(len(values), total / len(values))


def _timed_alone(layers: Layers, timing: TaskTiming, seconds: LayerSeconds) -> LayerSeconds:
    """Single layers by their own timings."""
    known = {row.layer: row for row in timing.layers}
    rows = [known.get(layer.name) for layer in layers.graph.layers]

    def column(field: str, otherwise: Numbers) -> Numbers:
        return np.array([getattr(row, field) if row else value for row, value in zip(rows, otherwise, strict=True)])

    return replace(
        seconds,
        forward_fixed=column("forward_fixed", seconds.forward_fixed),
        forward_each=column("forward_sample", seconds.forward_each),
        backward_fixed=column("backward_fixed", seconds.backward_fixed),
        backward_each=column("backward_sample", seconds.backward_each),
    )


def _ratio(part: Numbers, all_of_it: Numbers) -> Numbers:
    return np.divide(part, all_of_it, out=np.ones_like(part), where=all_of_it > 0)


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (fixed, each) of seconds = fixed + n * each through (n, seconds), neither negative.

    Least squares of the relative error, (predicted / measured - 1)^2, so that small n count like large ones. One point
    alone gives a line through zero. If the free line has a negative number, the best allowed one has a zero there.
    """
    known = [(float(n), max(t, _CLOCK_RESOLUTION)) for n, t in points]
    weights = [1 / t**2 for _, t in known]
    total = sum(weights)
    n_mean = sum(w * n for w, (n, _) in zip(weights, known, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, known, strict=True)) / total
    spread = sum(w * (n - n_mean) ** 2 for w, (n, _) in zip(weights, known, strict=True))
    if spread == 0:
        return 0.0, t_mean / n_mean
    slope = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t) in zip(weights, known, strict=True)) / spread
    if slope < 0:
        return t_mean, 0.0
    start = t_mean - slope * n_mean
    if start < 0:
        return 0.0, sum(n / t for n, t in known) / sum((n / t) ** 2 for n, t in known)
    return start, slope
