"""GPipe's three tables, ours beside the published ones, as text and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from evener.experiments.gpipe_memory import Largest
from evener.experiments.gpipe_models import NAIVE, PipelineSpeed
from evener.report.text import grid, human_bytes, human_count

Row = Mapping[str, object]

# What Huang et al. (2019) measured.

PUBLISHED_PARAMETERS = {
    "AmoebaNet-D": {NAIVE: 82e6, 1: 318e6, 2: 542e6, 4: 1.05e9, 8: 1.8e9},
    "Transformer": {NAIVE: 282.2e6, 1: 785.8e6, 8: 5.3e9, 32: 21.0e9, 128: 83.9e9},
}
"""Table 1: of the largest model that trains, by number of accelerators, of 8 GB and of 16 GB."""

PUBLISHED_THROUGHPUT = {
    "AmoebaNet-D": {
        (2, 1): 1.0, (4, 1): 1.13, (8, 1): 1.38,
        (2, 4): 1.07, (4, 4): 1.26, (8, 4): 1.72,
        (2, 32): 1.21, (4, 32): 1.84, (8, 32): 3.48,
    },
    "Transformer": {
        (2, 1): 1.0, (4, 1): 1.07, (8, 1): 1.3,
        (2, 4): 1.7, (4, 4): 3.2, (8, 4): 4.8,
        (2, 32): 1.8, (4, 32): 3.4, (8, 32): 6.3,
    },
}  # fmt: skip
"""Table 2: by (stages, micro-batches), relative to two stages and one micro-batch."""

PUBLISHED_WITHOUT_INTERCONNECT = {
    "AmoebaNet-D": {2: 1.0, 4: 1.7, 8: 2.7},
    "Transformer": {2: 1.0, 4: 1.8, 8: 3.3},
}
"""Table 3: by stages, 32 micro-batches, on GPUs whose tensors travel through the host; relative to two stages."""


def memory_rows(models: Sequence[Largest]) -> list[Row]:
    """Table 1: each largest model beside the published one; ratios are to one device with re-materialisation."""
    ones = {model.family: model.parameters for model in models if model.stages == 1}
    return [
        {
            "family": model.family,
            "stages": "naive" if model.stages == NAIVE else model.stages,
            "layers": model.layers,
            "parameters": model.parameters,
            "of_one_device": _over(model.parameters, ones.get(model.family)),
            "published_parameters": _known(model),
            "published_of_one_device": _over(_known(model), PUBLISHED_PARAMETERS[model.family][1]),
            "activation_bytes": model.activation_bytes,
            "fullest": model.fullest,
            "memory": model.memory,
        }
        for model in models
    ]


def _known(model: Largest) -> float | None:
    return PUBLISHED_PARAMETERS[model.family].get(model.stages)


def throughput_rows(speeds: Sequence[PipelineSpeed]) -> list[Row]:
    """Table 2: samples a second over those of the first row of a family, beside the published ones."""
    return [_speed_row(speed, speeds, PUBLISHED_THROUGHPUT[speed.family]) for speed in speeds]


def host_rows(speeds: Sequence[PipelineSpeed]) -> list[Row]:
    """Table 3: likewise, of tensors that travel through the host."""
    return [
        _speed_row(speed, speeds, {(k, speed.micro_batches): v for k, v in known.items()})
        for speed in speeds
        for known in [PUBLISHED_WITHOUT_INTERCONNECT[speed.family]]
    ]


def _speed_row(speed: PipelineSpeed, speeds: Sequence[PipelineSpeed], known: Mapping[tuple[int, int], float]) -> Row:
    """Relative to the first of the family, ours and published alike, so that both columns begin with 1."""
    first = next(one for one in speeds if one.family == speed.family)
    reference = known.get((first.stages, first.micro_batches))
    return {
        "family": speed.family,
        "stages": speed.stages,
        "micro_batches": speed.micro_batches,
        "samples_per_second": speed.samples_per_second,
        "relative": speed.samples_per_second / first.samples_per_second,
        "published_relative": _over(known.get((speed.stages, speed.micro_batches)), reference),
        "bubble": speed.bubble,
        "published_bubble": (speed.stages - 1) / (speed.micro_batches + speed.stages - 1),
    }


def memory_table(rows: Sequence[Row]) -> Table:
    """Table 1 as text."""
    heads = (
        "model", ">devices", ">layers", ">parameters", ">times one", ">published", ">times one", ">activations",
        ">fullest device",
    )  # fmt: skip
    cells = [
        (
            str(row["family"]),
            str(row["stages"]),
            str(row["layers"]),
            _count(row["parameters"]),
            _ratio(row["of_one_device"]),
            _count(row["published_parameters"]),
            _ratio(row["published_of_one_device"]),
            human_bytes(_number(row["activation_bytes"])),
            f"{_number(row['fullest']) / _number(row['memory']):.0%}",
        )
        for row in rows
    ]
    caption = "naive: one device that keeps all activations. Fullest: weights, gradients, Adam's state, activations."
    return grid("Table 1: the largest model that trains", heads, cells, caption)


def speed_table(title: str, rows: Sequence[Row], nodes: str) -> Table:
    """Tables 2 and 3 as text."""
    heads = ("model", ">K", ">M", ">samples/s", ">relative", ">published", ">idle", ">(K-1)/(M+K-1)")
    cells = [
        (
            str(row["family"]),
            str(row["stages"]),
            str(row["micro_batches"]),
            f"{_number(row['samples_per_second']):.1f}",
            _ratio(row["relative"]),
            _ratio(row["published_relative"]),
            f"{_number(row['bubble']):.0%}",
            f"{_number(row['published_bubble']):.0%}",
        )
        for row in rows
    ]
    return grid(title, heads, cells, nodes)


def _over(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _count(value: object) -> str:
    return "-" if value is None else f"{human_count(_number(value) / 1e6)} M"


def _ratio(value: object) -> str:
    return "-" if value is None else f"{_number(value):.2f}"
