"""The published settings: inputs are reproduced, and the other figures follow without further constants."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.experiments import abci
from evener.experiments.abci import IterationForecast, Machine
from evener.experiments.results import write_csv

Rows = dict[tuple[str, str, int], IterationForecast]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return abci.calibrate()


@pytest.fixture(scope="module")
def rows(machine: Machine) -> Rows:
    return {(row.strategy, row.model, row.gpus): row for row in abci.predictions(machine)}


def test_published_inputs_are_reproduced(rows: Rows) -> None:
    assert rows["data", "resnet50", 1].total_seconds == pytest.approx(0.1834, rel=1e-6)
    assert rows["data", "vgg16", 1].total_seconds == pytest.approx(0.2619, rel=1e-6)
    assert rows["data", "vgg16", 8].total_seconds == pytest.approx(0.4547, rel=1e-6)


def test_constants_are_plausible_for_a_v100_and_pcie(machine: Machine) -> None:
    assert 0.75 < machine.conv_flops / 15.7e12 < 0.95
    assert 1e-5 < machine.pass_seconds < 1e-4
    assert 5e9 < machine.ring_bandwidth < 12.5e9


def test_every_published_setting_has_a_row_whose_parts_sum_up(rows: Rows) -> None:
    asked = {("data", 1 << k) for k in range(11)}
    asked |= {(f"data+{mode}", 1 << k) for mode in ("filter", "spatial") for k in range(4, 11)}
    asked |= {(mode, 1 << k) for mode in ("filter", "channel") for k in range(2, 7)}
    assert {(strategy, gpus) for strategy, _, gpus in rows} == asked
    assert len(rows) == 2 * len(asked)
    for row in rows.values():
        assert row.total_seconds == pytest.approx(row.compute_seconds + row.communication_seconds)


def test_seconds_grow_with_the_ring_and_jump_beyond_one_node(rows: Rows) -> None:
    for model in ("resnet50", "vgg16"):
        seconds = [rows["data", model, 1 << k].total_seconds for k in (0, *range(2, 11))]
        assert seconds == sorted(seconds)
        jump = rows["filter", model, 8].communication_seconds / rows["filter", model, 4].communication_seconds
        assert jump > 10


def test_strips_within_a_node_compute_a_quarter_and_exchange_all(rows: Rows) -> None:
    data, strips = rows["data", "vgg16", 64], rows["data+spatial", "vgg16", 64]
    assert strips.compute_seconds < 0.4 * data.compute_seconds
    assert strips.communication_seconds == pytest.approx(data.communication_seconds, rel=0.05)


def test_four_rings_share_two_adapters(rows: Rows) -> None:
    strips, filters = rows["data+spatial", "vgg16", 64], rows["data+filter", "vgg16", 64]
    assert filters.communication_seconds > 1.5 * strips.communication_seconds


def test_file_has_the_documented_columns(rows: Rows, tmp_path: Path) -> None:
    write_csv([abci.as_row(row) for row in rows.values()], tmp_path / "abci.csv")
    lines = (tmp_path / "abci.csv").read_text().splitlines()
    assert lines[0] == "strategy,model,gpus,compute_seconds,communication_seconds,total_seconds"
    assert lines[1] == "data,resnet50,1,0.183400,0.000000,0.183400"
    assert len(lines) == 1 + 2 * (11 + 14 + 10)
