"""Tables of what is known before a run: the layers of a model, what was measured of the machines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from evener.graph import Layer, ModelGraph
from evener.profile import BatchTiming, ClusterProfile, DeviceProfile, TaskTiming, Throughput
from evener.report.text import Row, grid, human_bytes, human_count, human_seconds, percent


def layers_table(graph: ModelGraph) -> Table:
    """Every layer of `graph` with its costs per sample; in the caption those of the whole model."""
    forward, kept = human_count(graph.forward_flops / 1e6), human_bytes(graph.activation_bytes)
    total = (
        f"{human_count(graph.parameters)} parameters ({human_bytes(graph.parameter_bytes)}); "
        f"per sample {forward} MFLOP forward, {kept} kept for backward"
    )
    return grid(
        f"Model: {graph.name}",
        ("layer", "kind", "output of a sample", ">parameters", ">MFLOP", ">kept", "can be split along"),
        [_row(layer) for layer in graph.layers],
        caption=total,
    )


def _row(layer: Layer) -> Row:
    return (
        layer.name,
        layer.kind,
        " x ".join(map(str, layer.output_shape)),
        human_count(layer.parameters),
        human_count(layer.forward_flops / 1e6),
        human_bytes(layer.activation_bytes),
        ", ".join(layer.splits),
    )


_GIGA = 1e9


def profile_table(profile: ClusterProfile) -> Table:
    """The devices of `profile`: memory, and speed and score at every precision that was measured."""
    footnotes: list[str] = []
    rows: list[Row] = []
    for device in profile.devices:
        rows += [*_device_rows(device, footnotes), None]
    return grid(
        "Devices",
        ("node", "device", "model", ">cores", ">memory", ">GB/s", "precision", ">matmul", ">conv", ">score"),
        rows[:-1],
        caption="\n".join(("Speeds in GFLOP/s; score: geometric mean of matmul and conv.", *footnotes)),
    )


def _device_rows(device: DeviceProfile, footnotes: list[str]) -> Iterator[Row]:
    slowed = f" (slowed to {percent(device.speed)})" if device.speed != 1.0 else ""
    bandwidth = human_count(device.bandwidth / _GIGA) if device.bandwidth else "-"
    memory = human_bytes(device.memory_bytes)
    head: tuple[str, ...] = (device.node, device.device, device.model + slowed, str(device.cores), memory, bandwidth)
    for throughput in device.throughputs:
        yield (*head, *_speed_cells(throughput, footnotes))
        head = ("",) * len(head)
    if not device.throughputs:
        yield (*head, "-", "-", "-", "-")


def _speed_cells(throughput: Throughput, footnotes: list[str]) -> tuple[str, ...]:
    speeds = (throughput.matmul_flops, throughput.conv_flops)
    mark = _footnote(throughput.reason, footnotes) if None in speeds and throughput.reason else ""
    total = throughput.score
    return (
        throughput.precision,
        *(f"unsupported{mark}" if speed is None else human_count(speed / _GIGA) for speed in speeds),
        "-" if total is None else human_count(total),
    )


def _footnote(reason: str, footnotes: list[str]) -> str:
    """The mark of `reason` among the footnotes, which it joins if it is new."""
    numbered = [line.partition(" ")[2] for line in footnotes]
    if reason not in numbered:
        footnotes.append(f"[{len(footnotes) + 1}] {reason}")
        numbered.append(reason)
    return f" [{numbered.index(reason) + 1}]"


def links_table(profile: ClusterProfile) -> Table:
    """The measured links of `profile`: latency in microseconds, bandwidth in GB/s."""
    names = [f"{device.node} {device.device}" for device in profile.devices]
    rows = [
        (
            names[link.source],
            names[link.target],
            link.backend,
            human_count(link.alpha * 1e6),
            human_count(1 / link.beta / _GIGA) if link.beta else "-",
        )
        for link in profile.links
    ]
    return grid("Links", ("from", "to", "backend", ">latency µs", ">GB/s"), rows)


def timing_table(profile: ClusterProfile) -> Table:
    """Seconds per sample, forward and backward, of every task that was measured on a device of `profile`."""
    timed = [(device, timing) for device in profile.devices for timing in device.timings]
    sizes = sorted({batch.samples for _, timing in timed for batch in timing.batches})
    return grid(
        "Time per sample, by samples of the batch",
        ("task", "precision", "node", "device", *(f">{size}" for size in sizes), ">update", ">largest batch"),
        [_timing_row(device, timing, sizes) for device, timing in timed],
    )


def _timing_row(device: DeviceProfile, timing: TaskTiming, sizes: list[int]) -> Row:
    batches: dict[int, BatchTiming] = {batch.samples: batch for batch in timing.batches}
    each = [human_seconds(batches[size].seconds / size) if size in batches else "-" for size in sizes]
    largest = "-" if timing.max_samples is None else str(timing.max_samples)
    head = (timing.task, timing.precision, device.node, device.device)
    return (*head, *each, human_seconds(timing.update_seconds), largest)
