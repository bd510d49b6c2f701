"""TensorBoard scalars, read back from the event file."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from evener.errors import InvalidValue
from evener.report.tensorboard import open_scalars
from support.fake_runs import fake_run

NAMES = ("ada", "bob", "cleo")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_steps_and_validations_are_scalars_by_step(tmp_path: Path) -> None:
    run = fake_run(num_steps=5)
    threads = threading.active_count()
    writer = open_scalars(tmp_path / "scalars", NAMES)
    assert writer is not None
    for step in run.steps:
        writer.step(step)
    writer.validation(run.validations[0])
    writer.validation(msgspec.structs.replace(run.validations[1], accuracy=None))
    writer.close()
    assert threading.active_count() == threads

    scalars = read(tmp_path / "scalars")
    assert sorted(scalars) == [
        "accuracy/validation",
        *(f"computing/{name}" for name in NAMES),
        "loss/train",
        "loss/validation",
        "throughput/samples_per_second",
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


def values(scalars: list[tuple[int, float]]) -> list[float]:
    return [value for _, value in scalars]


def test_a_step_of_other_nodes_is_refused_until_their_names_are_given(tmp_path: Path) -> None:
    step = fake_run(num_steps=1).steps[0]
    writer = open_scalars(tmp_path, NAMES[:2])
    assert writer is not None
    with pytest.raises(InvalidValue, match=r"step\.nodes must be 2 nodes, got 3"):
        writer.step(step)
    writer.node_names = NAMES
    writer.step(step)
    writer.close()
    assert "waiting/cleo" in read(tmp_path)


def test_without_tensorboard_there_is_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert open_scalars(tmp_path / "scalars", NAMES) is None
    assert not (tmp_path / "scalars").exists()
