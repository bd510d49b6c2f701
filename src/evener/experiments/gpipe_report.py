"""GPipe's three tables, ours beside the published ones, as text and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from evener.atomic import atomic_write
from evener.experiments import gpipe_published as published
from evener.experiments.gpipe_memory import Largest
from evener.experiments.gpipe_speed import Speed
from evener.report.grid import grid
from evener.report.text import human_bytes, human_count

Row = Mapping[str, object]


def memory_rows(models: Sequence[Largest]) -> list[Row]:
    """Table 1: each largest model beside the published one; ratios are to one device with re-materialisation."""
    ones = {model.family: model.parameters for model in models if model.stages == 1}
    return [
        {
            "family": model.family,
            "stages": "naive" if model.stages == published.NAIVE else model.stages,
            "layers": model.layers,
            "parameters": model.parameters,
            "of_one_device": _over(model.parameters, ones.get(model.family)),
            "published_parameters": _known(model),
            "published_of_one_device": _over(_known(model), published.PARAMETERS[model.family][1]),
            "activation_bytes": model.activation_bytes,
            "fullest": model.fullest,
            "memory": model.memory,
        }
        for model in models
    ]


def _known(model: Largest) -> float | None:
    return published.PARAMETERS[model.family].get(model.stages)


def throughput_rows(speeds: Sequence[Speed]) -> list[Row]:
    """Table 2: samples a second over those of the first row of a family, beside the published ones."""
    return [_speed_row(speed, speeds, published.THROUGHPUT[speed.family]) for speed in speeds]


def host_rows(speeds: Sequence[Speed]) -> list[Row]:
    """Table 3: likewise, of tensors that travel through the host."""
    return [
        _speed_row(speed, speeds, {(k, speed.micro_batches): v for k, v in known.items()})
        for speed in speeds
        for known in [published.WITHOUT_INTERCONNECT[speed.family]]
    ]


def _speed_row(speed: Speed, speeds: Sequence[Speed], known: Mapping[tuple[int, int], float]) -> Row:
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


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All columns of `rows`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text.getvalue().encode())


def _over(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _count(value: object) -> str:
    return "-" if value is None else f"{human_count(_number(value) / 1e6)} M"


def _ratio(value: object) -> str:
    return "-" if value is None else f"{_number(value):.2f}"
