"""Seconds of every layer on a device: measured where timings exist, otherwise by the roofline of benchmark scores.

Roofline (Williams, Waterman & Patterson 2009) of one pass of a layer over n samples:

    seconds = pass_seconds + weights / bandwidth + n max(FLOPs / (speed e), bytes / bandwidth)

speed: measured FLOP/s of a matrix product (linear layers) or of a convolution. e: efficiency of narrow operations,
measured by width. The width depends on the pass, for F filters and C channels with k taps each:

    forward                      F                 the filters are a dim of the product
    gradient of the input        C                 the channels are
    gradient of the weights      min(F, C k)       both are

If the device was timed with the complete task, the passes are scaled so that their sums match the measurement; a layer
that was timed by itself has its own seconds. A part of a layer costs its fraction of the measured seconds per sample
but all of the fixed seconds: starting a pass does not get faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evener.oracle.cost.layers import Layers, Numbers
from evener.records.errors import InvalidValue
from evener.records.profile import DeviceProfile, TaskTiming

_CLOCK_RESOLUTION = 1e-9


FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """The part of every layer that each rank does, as fractions between 0 and 1, [ranks, layers]."""

    filters: Numbers
    channels: Numbers
    rows: Numbers


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of every layer on every rank for n samples, fixed + n * each: tables of [passes, ranks, layers]."""

    fixed: Numbers
    each: Numbers

    def of(self, samples: float) -> Numbers:
        """Return the seconds for `samples` samples."""
        return self.fixed + samples * self.each

    def sum(self, samples: float) -> float:
        """Return the sum over passes, ranks and layers."""
        return float(self.fixed.sum() + samples * self.each.sum())


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """The speed of a device.

    Attributes:
        conv_flops, matmul_flops: FLOP/s of wide operations.
        bandwidth: bytes per second, read and written together.
        pass_seconds: seconds of starting and ending a pass of a layer.
        widths: (filters, efficiency) by increasing filters; empty if narrow operations are as fast as wide ones.
        memory_bytes: memory that a run may use.
        timing: timing of the task, if it was measured on the device.
        learnt: ratio of measured to predicted seconds in past runs.
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
        """Return the speed of operations of these widths as a fraction of that of wide ones, interpolated on a log
        scale.
        """
        if not self.widths:
            return np.ones_like(widths)
        known, values = np.log(np.array(self.widths, dtype=np.float64).T)
        logarithm: Numbers = np.interp(np.log(np.maximum(widths, 1.0)), known, values)
        return np.exp(logarithm)


def device_of(profile: DeviceProfile, task: str, precision: str) -> DeviceSpeed:
    """Return the speed of a device at `precision`, with its timing of `task`.

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


def complete_share(layers: Layers) -> LayerShare:
    """Return the share of one rank that does all of every layer."""
    ones = np.ones((1, len(layers)))
    return LayerShare(filters=ones, channels=ones, rows=ones)


def layer_seconds(layers: Layers, devices: Sequence[DeviceSpeed], share: LayerShare | None = None) -> LayerSeconds:
    """Return the seconds that each of `devices` takes for its `share` of every layer, by default for all of it."""
    seconds = roofline(layers, devices, share or complete_share(layers))
    for rank, device in enumerate(devices):
        if device.timing is not None:
            plain = roofline(layers, [device], complete_share(layers))
            fixed, each = _timed(layers, device.timing, plain)
            all_each, own_each = plain.each[:, 0], seconds.each[:, rank]
            ratio = np.divide(own_each, all_each, out=np.ones_like(each), where=all_each > 0)
            seconds.fixed[:, rank], seconds.each[:, rank] = fixed, each * ratio
    learnt = _column(device.learnt for device in devices)
    return LayerSeconds(seconds.fixed * learnt, seconds.each * learnt)


def roofline(layers: Layers, devices: Sequence[DeviceSpeed], share: LayerShare) -> LayerSeconds:
    """Return the seconds that each of `devices` takes for its `share` of every layer, from benchmark scores alone."""
    bandwidth = _column(device.bandwidth for device in devices)
    conv, matmul = _column(device.conv_flops for device in devices), _column(device.matmul_flops for device in devices)
    filters, channels = layers.filters * share.filters, layers.channels * share.channels
    forward, weight_gradient, input_gradient = _efficiency(
        layers, devices, np.stack((filters, np.minimum(filters, channels * layers.taps), channels))
    )
    wide = share.filters * share.channels * share.rows / np.where(layers.is_convolution, conv, matmul)
    inputs, outputs = share.channels * share.rows, share.filters * share.rows
    weights = layers.weight_bytes * share.filters * share.channels / bandwidth
    start = _column(device.pass_seconds for device in devices)
    arithmetic = (
        layers.forward_flops * wide / forward,
        layers.forward_flops * wide / weight_gradient
        + (layers.backward_flops - layers.forward_flops) * wide / input_gradient,
    )
    memory = (
        (layers.forward_in * inputs + layers.forward_out * outputs) / bandwidth,
        (layers.backward_in * inputs + layers.backward_out * outputs) / bandwidth,
    )
    return LayerSeconds(np.stack((start + weights, start + 2 * weights)), np.maximum(arithmetic, memory))


def _column(values: Iterable[float]) -> Numbers:
    """Return one row per rank, to be combined with [ranks, layers]."""
    return np.array([*values])[:, None]


def _efficiency(layers: Layers, devices: Sequence[DeviceSpeed], widths: Numbers) -> Numbers:
    """Return the relative speed of weighted operations of `widths` [operations, ranks, layers]; 1 for others."""
    efficiency = np.ones_like(widths)
    for table in {device.widths: device for device in devices if device.widths}.values():
        ranks = np.array([device.widths == table.widths for device in devices])
        affected = ranks[:, None] & layers.is_weighted
        efficiency[:, affected] = table.efficiency(widths[:, affected])
    return efficiency


def _timed(layers: Layers, timing: TaskTiming, plain: LayerSeconds) -> tuple[Numbers, Numbers]:
    """Return (fixed, each) of [passes, layers]: passes scaled to the measured sums, and layers timed by themselves."""
    forward = fit_line((batch.samples, batch.forward_seconds) for batch in timing.batches)
    backward = fit_line((batch.samples, batch.backward_seconds) for batch in timing.batches)
    fixed, each = (
        _summing_to(np.array(totals), table[:, 0])
        for totals, table in zip(zip(forward, backward, strict=True), (plain.fixed, plain.each), strict=True)
    )
    index_of = {layer.name: index for index, layer in enumerate(layers.graph.layers)}
    for row in timing.layers:
        if row.layer in index_of:
            fixed[:, index_of[row.layer]] = row.forward_fixed, row.backward_fixed
            each[:, index_of[row.layer]] = row.forward_sample, row.backward_sample
    return fixed, each


def _summing_to(totals: Numbers, table: Numbers) -> Numbers:
    """Return rows of `table` scaled to sum to `totals`; a row of zeros becomes a row of equal numbers."""
    rows = np.where(table.sum(axis=1, keepdims=True) > 0, table, 1.0)
    scaled: Numbers = rows * (totals / rows.sum(axis=1))[:, None]
    return scaled


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = fixed + n * each to points (n, seconds) and return (fixed, each), neither negative.

    Minimises the squared relative error, (predicted / measured - 1)^2, so that small n count as much as large ones. A
    single point gives a line through zero. If the unconstrained line has a negative number, the best allowed line has a
    zero there.
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
