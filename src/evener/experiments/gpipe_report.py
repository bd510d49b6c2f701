"""GPipe's three tables, ours beside the published ones, as text and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from evener.experiments.gpipe_models import NAIVE, Largest, PipelineSpeed
from evener.experiments.results import Column, Row, ratio, table_of
from evener.report.text import human_bytes, human_count

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
            "of_one_device": ratio(model.parameters, ones.get(model.family)),
            "published_parameters": _known(model),
            "published_of_one_device": ratio(_known(model), PUBLISHED_PARAMETERS[model.family][1]),
            "activation_bytes": model.activation_bytes,
            "fullest": model.fullest,
            "memory": model.memory,
            "of_memory": model.fullest / model.memory,
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
        "published_relative": ratio(known.get((speed.stages, speed.micro_batches)), reference),
        "bubble": speed.bubble,
        "published_bubble": (speed.stages - 1) / (speed.micro_batches + speed.stages - 1),
    }


def _millions(count: float) -> str:
    return f"{human_count(count / 1e6)} M"


_MEMORY = (
    Column("model", "family"),
    Column(">devices", "stages"),
    Column(">layers", "layers"),
    Column(">parameters", "parameters", _millions),
    Column(">times one", "of_one_device", "{:.2f}"),
    Column(">published", "published_parameters", _millions),
    Column(">times one", "published_of_one_device", "{:.2f}"),
    Column(">activations", "activation_bytes", human_bytes),
    Column(">fullest device", "of_memory", "{:.0%}"),
)
_SPEED = (
    Column("model", "family"),
    Column(">K", "stages"),
    Column(">M", "micro_batches"),
    Column(">samples/s", "samples_per_second", "{:.1f}"),
    Column(">relative", "relative", "{:.2f}"),
    Column(">published", "published_relative", "{:.2f}"),
    Column(">idle", "bubble", "{:.0%}"),
    Column(">(K-1)/(M+K-1)", "published_bubble", "{:.0%}"),
)


def memory_table(rows: Sequence[Row]) -> Table:
    """Table 1 as text."""
    caption = "naive: one device that keeps all activations. Fullest: weights, gradients, Adam's state, activations."
    return table_of("Table 1: the largest model that trains", _MEMORY, rows, caption)


def speed_table(title: str, rows: Sequence[Row], nodes: str) -> Table:
    """Tables 2 and 3 as text."""
    return table_of(title, _SPEED, rows, nodes)
