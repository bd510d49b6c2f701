"""Experiment trackers of Ultralytics on several nodes: the calls that they get, by stand-ins that write them down."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.yolo_cases import needs_ultralytics
from support.yolo_commands import TESTS
from support.yolo_scripts import DOUBLE, prepare, run_script

pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(600)]
TRACKERS = {"wandb": "wandb", "mlflow": "mlflow", "clearml": "clearml", "comet": "comet", "dvclive": "dvc"}
"""Names of trackers, and the settings of Ultralytics that turn them on."""
SCRIPT = """
import os
import signal
from pathlib import Path

from evener.yolo import YOLO
from settings import SETTINGS
from ultralytics import settings

MODE = "calm"


def die(trainer):
    if trainer.epoch == 1 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings.update({name: True for name in ("wandb", "mlflow", "clearml", "comet", "dvc")} | {"tensorboard": False})
    settings.update({"runs_dir": str(Path("runs").resolve())})
    model = YOLO("yolov8n.yaml")
    if MODE == "lost":
        model.add_callback("on_train_batch_start", die)
    model.train(**SETTINGS | {"plots": True, "project": "mine"}, nodes="1,1", shares="5,3", node_patience=5)
"""
BEGINNINGS = {
    "wandb": "wandb.init",
    "mlflow": "mlflow.start_run",
    "clearml": "clearml.Task.init",
    "comet": "comet.start",
    "dvclive": "dvclive(",
}


def calls(folder: Path, script: str, **words: str) -> list[str]:
    """The calls of all trackers in the run of a script, in order; it is plain Ultralytics' if `nodes` are left out."""
    path = prepare(folder, "train_from_yaml", is_plain=False)
    path.write_text(script)
    site = str(TESTS / "support" / "tracker_site")
    file = folder / "calls.txt"
    done = run_script([str(path)], folder, PYTHONPATH=f"{DOUBLE}:{site}", TRACKER_CALLS=str(file), **words)
    assert done.returncode == 0, done.stderr
    assert "not initialized" not in done.stdout + done.stderr
    return file.read_text().splitlines()


def of(tracker: str, lines: list[str]) -> list[str]:
    """The calls of a tracker, but those for pictures of batches, which threads draw at any time."""
    own = [line for line in lines if line.startswith(tracker)]
    return [line for line in own if "_batch" not in line and not line.endswith("get_logger()")]


def test_trackers_get_the_calls_of_one_process_and_are_taken_over(tmp_path: Path) -> None:
    plain_script = SCRIPT.replace("from evener.yolo import", "from ultralytics import")
    plain_script = plain_script.replace(', nodes="1,1", shares="5,3", node_patience=5', "")
    plain = calls(tmp_path / "plain", plain_script)
    nodes = calls(tmp_path / "nodes", SCRIPT)
    lost = calls(tmp_path / "lost", SCRIPT.replace('"calm"', '"lost"'))
    for tracker in TRACKERS:
        wanted = of(tracker, plain)
        assert len(wanted) > 5, tracker
        assert sorted(of(tracker, nodes)) == sorted(wanted)  # threads draw other pictures in any order
        begun = [line for line in of(tracker, lost) if line.startswith(BEGINNINGS[tracker])]
        assert len(begun) == 2, (tracker, begun)
        assert of(tracker, lost)[-3:] == wanted[-3:], tracker  # the end is reported, by the next leader
    first, second = (line for line in lost if line.startswith("wandb.init"))
    assert "resume=None" in first
    assert "resume=allow" in second
    assert "name=train" in second
