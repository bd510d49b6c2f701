"""The experiment with scattered GPUs: its commands and its evaluation of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.experiments.options import ScatteredConfig
from evener.experiments.scattered import Method, TimedRun, command_of, methods_of, row_of, rows_of
from evener.records.errors import InvalidValue
from evener.records.plan import Assignment, Plan
from evener.records.record import NodeStep, NodeSummary, Step, TrainRecord
from support.commands import evener_here
from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import yolo


def asked(folder: Path, **settings: Any) -> ScatteredConfig:
    data = folder / "my.yaml"
    data.touch()
    return ScatteredConfig(data=data, output=folder / "out", **settings)


def record(
    *seconds: float, io: float = 0.5, compute: float = 3.0, shares: tuple[float, ...] = (0.5, 0.5)
) -> TrainRecord:
    """Return the record of a run with epochs of these durations."""
    node = NodeStep(
        samples=4, io_seconds=io, compute_seconds=compute, wait_seconds=0.25, update_seconds=0.0, sent_bytes=1
    )
    names = [f"node-{k}" for k in range(len(shares))]
    return TrainRecord(
        task="t",
        plan=Plan(
            strategy="data",
            batch_size=4 * len(shares),
            assignments=tuple(
                Assignment(rank=k, node=name, device="cpu", samples=4, sample_seconds=0.1, reason="")
                for k, name in enumerate(names)
            ),
        ),
        seed=0,
        epochs=len(seconds),
        precision="fp32",
        seconds=sum(seconds),
        samples_per_second=1.0,
        final_loss=1.0,
        validation_accuracy=None,
        startup_seconds=0.0,
        steps=tuple(
            Step(step=k + 1, epoch=k, samples=8, loss=1.0, seconds=one, nodes=(node,) * len(shares))
            for k, one in enumerate(seconds)
        ),
        nodes=tuple(
            NodeSummary(
                name=name,
                device="cpu",
                share=share,
                seconds_computing=1.0,
                seconds_waiting=0.0,
                bytes_sent=10,
                bytes_received=10,
                peak_memory_bytes=1,
            )
            for name, share in zip(names, shares, strict=True)
        ),
    )


def test_every_method_is_timed_on_all_nodes_between_single_node_runs(tmp_path: Path) -> None:
    methods = [(method.speeds, method.name) for method in methods_of(asked(tmp_path))]
    names = ("every batch", "average, threads", "average, device", "average, cores", "diloco")
    alone = ("1", "alone")
    assert methods == [alone, *(("1,1", name) for name in names), alone, *(("1,0.5", name) for name in names), alone]


def test_nodes_are_compared_with_the_single_node_before_and_after_them() -> None:
    alone, two, uneven = Method("alone", "1", ()), Method("every batch", "1,1", ()), Method("every batch", "1,0.5", ())
    seconds = {alone: iter((10.0, 12.0, 20.0)), two: iter((5.5,)), uneven: iter((16.0,))}
    rows = rows_of(
        [TimedRun(method, record(90.0, next(seconds[method])), None) for method in (alone, two, alone, uneven, alone)]
    )
    assert [row["of_ideal"] for row in rows] == pytest.approx([1.0, 1.0, 1.0, 16.0 / 1.5 / 16.0, 1.0])
    assert [row["seconds"] for row in rows] == [10.0, 5.5, 12.0, 16.0, 20.0]


def test_diloco_exchanges_about_once_per_epoch(tmp_path: Path) -> None:
    method = Method("diloco", "1,0.5", ("--agreement", "diloco", "--local-steps", "{an epoch}"))
    words = command_of(asked(tmp_path, batch_size=8), method, tmp_path / "run", images=205)
    assert words[words.index("--local-steps") + 1] == "18"  # of the node that does two thirds of 26 batches
    assert words[words.index("--local-nodes") + 1] == "1,0.5"
    assert "nbs=8" not in words


def test_each_batch_is_a_step_if_nodes_synchronise(tmp_path: Path) -> None:
    words = command_of(asked(tmp_path, batch_size=8), Method("every batch", "1,1", ()), tmp_path / "run", images=205)
    assert "nbs=8" in words
    assert "--agreement" not in words


def test_first_epoch_is_ignored_and_the_ideal_is_the_sum_of_speeds() -> None:
    alone = row_of(TimedRun(Method("alone", "1", ()), record(90.0, 10.0, 10.0, shares=(1.0,)), 0.5), None)
    assert (alone["seconds"], alone["of_ideal"], alone["transfer_seconds"]) == (10.0, 1.0, 0.0)
    merged = row_of(TimedRun(Method("average, device", "1,1", ("--agreement",)), record(90.0, 6.25, 6.25), 0.4), alone)
    assert merged["of_ideal"] == pytest.approx(0.8)
    assert merged["published_of_ideal"] == pytest.approx(0.767, abs=1e-3)
    assert merged["transfer_seconds"] == pytest.approx(6.25 - 3.5)
    assert merged["loading_seconds"] == pytest.approx(0.25)  # half of what one alone loads
    uneven = row_of(TimedRun(Method("every batch", "1,0.5", ()), record(90.0, 8.0), None), alone)
    assert uneven["of_ideal"] == pytest.approx(10 / 1.5 / 8)
    assert (uneven["transfer_seconds"], uneven["published_of_ideal"], uneven["map"]) == (0.25, None, None)
    assert (alone["take_part"], uneven["take_part"]) == (1, 2)


def test_invalid_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        ScatteredConfig(data=tmp_path / "no.yaml")
    done = evener_here("experiment", "scattered-gpus", "no.yaml", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@needs_ultralytics
@pytest.mark.slow
def test_experiment_writes_table_figure_and_page(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"experiment scattered-gpus {data} --imgsz 64 --epochs 2 --batch-size 4 --nodes 1,0.5 --json"
    done = yolo(*words.split(), cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["cells"]) == 7
    written = {file.name for file in (tmp_path / "scattered-gpus").iterdir()}
    assert written >= {"scattered-gpus.csv", "scattered-gpus.png", "report.html", "00-alone", "05-diloco", "06-alone"}
