"""`evener experiment resnet152-strategies` times every strategy, counts its bytes, and draws it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from evener.experiments.local_ranks import equal_nodes
from evener.experiments.options import StrategiesConfig, numbers
from evener.experiments.strategies import (
    ResNetSize,
    StepTime,
    StrategyCell,
    StrategyRow,
    cells_of,
    run,
    show,
    speed_up,
    table,
)
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement, plan_replicas
from evener.oracle.division.rules import division_of
from evener.parallel.op_graph import op_graph
from evener.records.errors import InvalidInput
from support.commands import evener, evener_here
from support.step_traffic import step_traffic

TINY = ResNetSize(size=32, width=4, depths=(1, 1, 2, 1))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[StrategyRow]:
    folder = tmp_path_factory.mktemp("strategies")
    config = StrategiesConfig(
        ranks="1,2",
        batch_size="4",
        chunks="2",
        strategies="data,spatial,filter,sharded,pipeline",
        steps=1,
        size=32,
        output=folder,
    )
    return run(config, as_json=False, network=TINY)


@pytest.mark.slow
def test_every_cell_is_timed_with_serial_first(done: list[StrategyRow]) -> None:
    names = ["serial", "data", "spatial", "filter", "sharded", "pipeline"]
    assert [(r.cell.batch, r.cell.strategy) for r in done] == [(4, name) for name in names]
    for row in done:
        assert row.timing is not None
        assert 0 < row.timing.fastest <= row.timing.seconds <= row.timing.slowest


def test_team_pipelines_require_two_ranks_per_stage() -> None:
    config = StrategiesConfig(ranks="1,2,3,4", batch_size="8", chunks="2", strategies="pipeline,pipeline+hybrid")
    assert [cell.ranks for cell in cells_of(config) if cell.strategy == "pipeline+hybrid"] == [4]


@pytest.mark.slow
def test_team_pipeline_is_timed(tmp_path: Path) -> None:
    config = StrategiesConfig(
        ranks="4", batch_size="4", chunks="2", strategies="pipeline+hybrid", steps=1, size=32, output=tmp_path
    )
    (row,) = run(config, as_json=False, network=TINY)
    assert row.timing is not None
    assert row.timing.sent_bytes > 0


def predicted(cell: StrategyCell) -> float:
    """Return the bytes of the rank that sends most, by the oracle's table."""
    arrangement = Arrangement(division=division_of(cell.strategy), replicas=(Replica(shares=(1.0,) * cell.ranks),))
    images = torch.empty(cell.batch, 3, TINY.size, TINY.size, device="meta")
    plans = plan_replicas(op_graph(TINY.build(), [images]).network, arrangement)
    return max(sum(sent for sent, _ in row.values()) for row in step_traffic(plans, arrangement, 4))


@pytest.mark.slow
def test_sent_bytes_match_the_prediction(done: list[StrategyRow]) -> None:
    for row in done:
        assert row.timing is not None
        if row.cell.strategy in ("spatial", "filter", "sharded"):
            assert row.timing.sent_bytes == pytest.approx(predicted(row.cell), abs=1)
    assert {r.timing.sent_bytes for r in done if r.cell.strategy == "serial" and r.timing} == {0}


def timing(seconds: float) -> StepTime:
    return StepTime(seconds=seconds, fastest=seconds, slowest=seconds, sent_bytes=2_000_000)


def test_files_contain_all_rows_and_curves_over_ranks_and_batches(tmp_path: Path) -> None:
    rows = [
        StrategyRow(cell=StrategyCell(strategy=strategy, ranks=ranks, batch=batch, chunks=chunks), timing=took)
        for batch, took in ((8, timing(1.0)), (16, timing(2.0)), (32, None))
        for strategy, ranks, chunks in (("serial", 1, 1), ("data", 2, 1), ("pipeline", 2, 4), ("pipeline", 2, 8))
    ]
    show(rows, "a node: a core", Console(), tmp_path)
    with (tmp_path / "strategies.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["strategy"], int(r["ranks"]), int(r["batch"]), int(r["chunks"])) for r in read] == [
        (r.cell.strategy, r.cell.ranks, r.cell.batch, r.cell.chunks) for r in rows
    ]
    assert [r["seconds"] for r in read] == ["1.0"] * 4 + ["2.0"] * 4 + [""] * 4
    for name in ("ranks", "batch"):
        assert (tmp_path / f"strategies-by-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_speed_up_is_relative_to_one_process_with_the_same_batch() -> None:
    rows = [
        StrategyRow(cell=StrategyCell(strategy="serial", ranks=1, batch=8), timing=timing(3.0)),
        StrategyRow(cell=StrategyCell(strategy="serial", ranks=1, batch=16), timing=timing(7.0)),
        StrategyRow(cell=StrategyCell(strategy="data", ranks=2, batch=8), timing=timing(2.0)),
        StrategyRow(cell=StrategyCell(strategy="pipeline", ranks=2, batch=8, chunks=4), timing=None),
    ]
    assert [speed_up(row, rows) for row in rows] == [1.0, 1.0, 1.5, None]
    cells = [list(column.cells) for column in table(rows, "a node: a core").columns]
    assert [str(cell) for cell in cells[0]] == ["serial", "serial", "data", "pipeline, 4 chunks"]
    assert [str(cell) for cell in cells[3]] == ["3.000", "7.000", "2.000", "does not fit"]
    assert [str(cell) for cell in cells[4]] == ["2.7", "2.3", "4.0", "-"]
    assert [str(cell) for cell in cells[6]] == ["2.0", "2.0", "2.0", "-"]


def test_cells_with_fewer_samples_than_ranks_or_chunks_are_skipped() -> None:
    asked = StrategiesConfig(ranks="1,4", batch_size="2,8", strategies="data,pipeline,data+pipeline", chunks="2,4")
    cells = [(c.batch, c.strategy, c.chunks) for c in cells_of(asked) if c.ranks == 4]
    assert cells == [
        (2, "pipeline", 2), (8, "data", 1), (8, "pipeline", 2), (8, "pipeline", 4),
        (8, "data+pipeline", 2), (8, "data+pipeline", 4),
    ]  # fmt: skip


def test_more_nodes_than_cores_share_them_at_one_speed() -> None:
    many = 64 * (torch.get_num_threads() + 1)
    speeds = {node.speed_at(0) for ranks in (1, 2, 5) for node in equal_nodes(ranks, many)}
    assert len(speeds) == 1
    assert speeds.pop() < 0.5


@pytest.mark.parametrize("text", ["", "0", "2,2", "two", "-1"])
def test_invalid_number_lists_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        numbers("--ranks", text)


def test_invalid_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, sentence in {
        ("--strategies", "data,magic"): "--strategies must be some of data, filter, channel",
        ("--full", "--ranks", "99"): "--full needs 99 GPUs",
        ("--steps", "0"): "--steps must be positive, got 0",
        (
            "--ranks",
            "4",
            "--batch-size",
            "2",
            "--strategies",
            "data",
        ): "at least a sample per rank and micro-batch",
    }.items():
        result = evener_here("experiment", "resnet152-strategies", *words, cwd=tmp_path)
        assert result.returncode == 2
        assert sentence in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_command_times_resnet152(tmp_path: Path) -> None:
    words = ("--steps", "1", "--batch-size", "4", "--output", "out", "--json")
    result = evener("experiment", "resnet152-strategies", *words, cwd=tmp_path, timeout=380)
    assert result.returncode == 0, result.stderr
    cells = json.loads(result.stdout.strip().splitlines()[-1])["cells"]
    assert [cell["strategy"] for cell in cells] == ["serial", *StrategiesConfig().strategies.split(",")]
    sent = {cell["strategy"]: cell["sent_bytes"] for cell in cells}
    assert sent["sharded"] < 0.4 * sent["filter"]
    assert "Published" in result.stderr
