"""`evener experiment gpipe`: the largest models fit their memory when they train, beside the published ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from evener.experiments.gpipe import host_rows, memory_rows, run, throughput_rows
from evener.experiments.gpipe_models import (
    AMOEBANET,
    FULL,
    NAIVE,
    SMALL,
    TRANSFORMER,
    Largest,
    PipelineSpeed,
    Scale,
    largest_fitting,
)
from evener.experiments.options import GpipeConfig
from support.commands import evener, evener_here

TINY = Scale(
    family=TRANSFORMER, width=16, length=6, classes=12, samples=8, micro_batches=4, memory=0.55e6,
    timed_layers=2, timed_width=16, timed_samples=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("gpipe")
    config = GpipeConfig(stages="2", micro_batches="1,4", steps=1, output=folder)
    return folder, run(config, as_json=False, families=[TINY])


@pytest.mark.slow
def test_more_devices_train_a_larger_model_within_their_memory(done: tuple[Path, dict[str, list[Any]]]) -> None:
    _, tables = done
    naive, one, two = tables["1"]
    assert [row["stages"] for row in (naive, one, two)] == ["naive", 1, 2]
    assert 0 < naive["parameters"] < one["parameters"] < two["parameters"]
    assert two["of_one_device"] == two["parameters"] / one["parameters"]
    assert one["activation_bytes"] < naive["activation_bytes"]
    for row in (naive, one, two):
        assert 0.5 < row["fullest"] / row["memory"] < 1.1, row


def test_planned_models_fit_and_use_over_half_of_the_memory(tmp_path: Path) -> None:
    config = GpipeConfig(table="1", stages="2", micro_batches="4", planned=True, output=tmp_path)
    naive, one, two = run(config, as_json=False, families=[TINY])["1"]
    assert 0 < naive["parameters"] < one["parameters"] < two["parameters"]
    for row in (naive, one, two):
        assert 0.5 < row["fullest"] / row["memory"] <= 1.0, row
        model = TINY.build_without_memory(row["layers"])
        assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_trained_model_uses_the_planned_memory(done: tuple[Path, dict[str, list[Any]]], tmp_path: Path) -> None:
    config = GpipeConfig(table="1", stages="2", micro_batches="4", planned=True, output=tmp_path)
    for planned, trained in zip(run(config, as_json=False, families=[TINY])["1"], done[1]["1"], strict=True):
        assert planned["parameters"] == trained["parameters"]
        assert planned["fullest"] == pytest.approx(trained["fullest"], rel=0.15)


@pytest.mark.slow
def test_every_number_of_micro_batches_is_timed_once(done: tuple[Path, dict[str, list[Any]]]) -> None:
    _, tables = done
    assert [(row["stages"], row["micro_batches"]) for row in tables["2"]] == [(2, 1), (2, 4)]
    assert tables["3"][0]["samples_per_second"] == tables["2"][1]["samples_per_second"]
    assert all(0 < row["bubble"] < 1 for row in tables["2"])


@pytest.mark.slow
def test_files_contain_the_tables(done: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, tables = done
    for number, rows in tables.items():
        with (folder / f"gpipe-table-{number}.csv").open() as file:
            read = list(csv.DictReader(file))
        assert [row["family"] for row in read] == [row["family"] for row in rows]
        assert list(read[0]) == list(rows[0])


@pytest.mark.parametrize("guess", [1, 4, 7, 8, 15])
@pytest.mark.parametrize("last", [0, 1, 3, 7, 40])
def test_search_finds_the_largest_fit_from_any_guess(guess: int, last: int) -> None:
    assert largest_fitting(lambda count: count <= last, guess) == last


def test_search_tries_few_models_for_any_guess() -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= 1000

    assert largest_fitting(fits, 1) == 1000
    assert len(tried) <= 22


def largest(family: str, stages: int, parameters: int) -> Largest:
    return Largest(
        family=family, stages=stages, layers=3, parameters=parameters, activation_bytes=1, fullest=1, memory=1.0
    )


def test_published_models_are_compared_as_ratios_to_one_device() -> None:
    rows = memory_rows([largest(AMOEBANET, NAIVE, 10), largest(AMOEBANET, 1, 40), largest(AMOEBANET, 8, 200)])
    assert [row["of_one_device"] for row in rows] == [0.25, 1.0, 5.0]
    assert [row["published_of_one_device"] for row in rows] == pytest.approx([82 / 318, 1.0, 1800 / 318])
    rows = memory_rows([largest(TRANSFORMER, 1, 40), largest(TRANSFORMER, 2, 80), largest(TRANSFORMER, 128, 4000)])
    assert rows[1]["published_of_one_device"] is None
    assert rows[2]["published_of_one_device"] == pytest.approx(83.9 / 0.7858)


def speed(stages: int, micro_batches: int, rate: float) -> PipelineSpeed:
    return PipelineSpeed(
        family=TRANSFORMER, stages=stages, micro_batches=micro_batches, samples_per_second=rate, bubble=0.1
    )


def test_measured_and_published_speeds_are_relative_to_the_first() -> None:
    rows = throughput_rows([speed(2, 4, 10.0), speed(4, 4, 15.0), speed(4, 32, 20.0), speed(4, 7, 18.0)])
    assert [row["relative"] for row in rows] == [1.0, 1.5, 2.0, 1.8]
    assert [row["published_relative"] for row in rows] == pytest.approx([1.0, 3.2 / 1.7, 2.0, None])
    assert rows[1]["published_bubble"] == 3 / 7
    assert [row["published_relative"] for row in host_rows([speed(2, 32, 1.0), speed(8, 32, 2.0)])] == [1.0, 3.3]


def test_scales_cover_both_families_with_the_size_of_the_paper() -> None:
    assert [scale.family for scale in SMALL] == [scale.family for scale in FULL] == [AMOEBANET, TRANSFORMER]
    model = FULL[0].build_without_memory(18)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(123e6, rel=0.01)


def test_invalid_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, sentence in {
        ("--table", "4"): "--table must be some of 1,2,3",
        ("--micro-batches", "1,65"): "--micro-batches must be at most 64",
        ("--full", "--stages", "99"): "--full needs 99 GPUs",
        ("--planned",): "--table must be 1 with --planned",
    }.items():
        result = evener_here("experiment", "gpipe", *words, cwd=tmp_path)
        assert result.returncode == 2
        assert sentence in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_makes_tables_of_both_families(tmp_path: Path) -> None:
    words = ("--table", "1,3", "--stages", "2", "--micro-batches", "8", "--steps", "1", "--output", "out", "--json")
    result = evener("experiment", "gpipe", *words, cwd=tmp_path, timeout=580)
    assert result.returncode == 0, result.stderr
    tables = json.loads(result.stdout.strip().splitlines()[-1])["tables"]
    assert [(row["family"], row["stages"]) for row in tables["1"]] == [
        (family, stages) for family in (AMOEBANET, TRANSFORMER) for stages in ("naive", 1, 2)
    ]
    for row in tables["1"]:
        assert 0.3 < row["fullest"] / row["memory"] < 1.1
    assert [row["family"] for row in tables["3"]] == [AMOEBANET, TRANSFORMER]
