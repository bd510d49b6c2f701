"""TensorBoard scalars, read back from the event file."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from evener.records.errors import InvalidValue, MissingExtra
from evener.records.plan import Assignment, Plan
from evener.records.version import pip_install
from evener.report.loggers import TensorBoard, has_tensorboard
from evener.report.scalars import ScalarLog, scalars_of_step
from support.fake_runs import fake_run

NAMES = ("ada", "bob", "cleo")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_scalars_begin_with_the_plan_and_end_with_the_log(tmp_path: Path) -> None:
    run = fake_run(num_steps=5)
    log = ScalarLog(TensorBoard(tmp_path / "scalars"))
    log(run.steps[0])
    log(run.validations[0])
    log(plan(NAMES))
    log(run.steps[1])
    log.close()
    log(run.steps[2])
    assert [step for step, _ in read(tmp_path / "scalars")["loss/train"]] == [2]


def test_steps_and_validations_are_scalars_by_step(tmp_path: Path) -> None:
    run = fake_run(num_steps=5)
    threads = threading.active_count()
    log = ScalarLog(TensorBoard(tmp_path / "scalars"))
    log(plan(NAMES))
    for step in run.steps:
        log(step)
    log(run.validations[0])
    log(msgspec.structs.replace(run.validations[1], accuracy=None, metrics={"top5": 0.5}))
    log.close()
    assert threading.active_count() == threads

    scalars = read(tmp_path / "scalars")
    assert sorted(scalars) == [
        "accuracy/validation",
        *(f"computing/{name}" for name in NAMES),
        "loss/train",
        "loss/validation",
        "throughput/samples_per_second",
        "top5/validation",
        *(f"waiting/{name}" for name in NAMES),
    ]
    assert [step for step, _ in scalars["loss/train"]] == [1, 2, 3, 4, 5]
    assert values(scalars["loss/train"]) == pytest.approx([step.loss for step in run.steps])
    speeds = [100 / step.seconds for step in run.steps]
    assert values(scalars["throughput/samples_per_second"]) == pytest.approx(speeds)
    fifth = run.steps[4]
    node = fifth.nodes[1]
    computing = node.io_seconds + node.compute_seconds + node.update_seconds
    assert values(scalars["waiting/bob"])[4] == pytest.approx(node.wait_seconds / fifth.seconds)
    assert values(scalars["computing/bob"])[4] == pytest.approx(computing / fifth.seconds)
    assert values(scalars["accuracy/validation"]) == pytest.approx([run.validations[0].accuracy])
    assert [step for step, _ in scalars["loss/validation"]] == [1, 2]


WRITE = """
import sys
from pathlib import Path
from evener.records.plan import Assignment, Plan
from evener.report.loggers import TensorBoard
board = TensorBoard(Path(sys.argv[1]))
board.begin(Plan(strategy="data", batch_size=7, assignments=(Assignment(rank=0, node="ada", device="cpu", samples=7),)))
board.write({"loss/train": 0.5}, 3)
board.close()
assert not {"torch", "tensorflow"} & set(sys.modules)
"""


def test_event_files_are_written_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], check=True)
    assert read(tmp_path) == {"loss/train": [(3, 0.5)]}
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (text,) = events.Tensors("plan")
    assert text.tensor_proto.string_val[0] == b"strategy: data, batch_size: 7, nodes: ada 7"


def values(scalars: list[tuple[int, float]]) -> list[float]:
    return [value for _, value in scalars]


def plan(names: Sequence[str]) -> Plan:
    assignments = tuple(Assignment(rank=rank, node=name, device="cpu", samples=1) for rank, name in enumerate(names))
    return Plan(strategy="data", batch_size=len(names), assignments=assignments)


def test_step_with_other_nodes_is_rejected_until_a_plan_names_them(tmp_path: Path) -> None:
    step = fake_run(num_steps=1).steps[0]
    with pytest.raises(InvalidValue) as error:
        scalars_of_step(step, NAMES[:2])
    assert (error.value.field, error.value.value) == ("step.nodes", 3)
    log = ScalarLog(TensorBoard(tmp_path))
    log(plan(NAMES[:2]))
    log(plan(NAMES))
    log(step)
    log.close()
    assert "waiting/cleo" in read(tmp_path)


def test_missing_tensorboard_gives_an_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_tensorboard()
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtra) as error:
        TensorBoard(tmp_path / "scalars").begin(plan(NAMES))
    assert pip_install("report") in str(error.value)
    assert not (tmp_path / "scalars").exists()


def test_step_with_another_number_of_nodes_than_the_plan_has_no_scalars_of_nodes() -> None:
    logged: list[set[str]] = []
    logger: Any = SimpleNamespace(begin=bool, write=lambda scalars, _: logged.append(set(scalars)), close=bool)
    log = ScalarLog(logger)
    log(plan(NAMES[:2]))
    log(fake_run(num_steps=1).steps[0])
    assert logged == [{"loss/train", "throughput/samples_per_second"}]
