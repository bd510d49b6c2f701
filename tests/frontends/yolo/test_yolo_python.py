"""`evener.yolo.YOLO`: scripts for Ultralytics with one import changed, on uneven nodes, and as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.yolo_cases import needs_ultralytics
from support.yolo_scripts import (
    NAMES,
    REPEATING,
    prepare,
    require_same_results,
    require_same_rows,
    run_script,
    seen,
)

pytestmark = [needs_ultralytics, pytest.mark.timeout(600)]

AGAIN = """
from settings import SETTINGS
from ultralytics import YOLO

if __name__ == "__main__":
    YOLO("runs/train/weights/best.pt").train(**SETTINGS | {"val": False, "epochs": 2, "name": "again"})
"""
"""Plain Ultralytics, from the weights of the first training on nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_script_with_one_import_changed_has_the_results_of_plain_ultralytics(name: str, tmp_path: Path) -> None:
    plain, nodes = tmp_path / "plain", tmp_path / "nodes"
    done = run_script([str(prepare(plain, name, is_plain=True))], plain)
    assert done.returncode == 0, done.stderr
    done = run_script([str(prepare(nodes, name, is_plain=False, nodes="nodes='1,0.5', shares='5,3'"))], nodes)
    assert done.returncode == 0, done.stderr
    assert seen(nodes) == seen(plain)
    require_same_results(nodes, plain)
    (*_, record) = sorted((nodes / "runs").rglob("record.json"))
    assert len(read_noun(record, TrainRecord).nodes) == 2
    if name == "twice":
        script = nodes / "again.py"
        script.write_text(AGAIN)
        assert run_script([str(script)], nodes).returncode == 0
        require_same_rows(nodes / "runs" / "train-2" / "results.csv", nodes / "runs" / "again" / "results.csv")
    if name in REPEATING:
        return
    launched = tmp_path / "launched"
    script = prepare(launched, name, is_plain=False)
    done = run_script(["-m", "evener", "run", "--local-nodes", "1,0.5", str(script)], launched)
    assert done.returncode == 0, done.stderr
    assert set(seen(launched)) == set(seen(plain))
    require_same_results(launched, plain)


RANKS = """
import os
import time
from pathlib import Path

from evener.records.errors import InvalidInput
from evener.yolo import YOLO
from settings import SETTINGS, note

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_train_end", lambda trainer: note("once"))
    until = time.monotonic() + 60
    while os.environ.get("RANK") == "1" and not Path("runs/train").exists() and time.monotonic() < until:
        time.sleep(0.1)  # this rank finds that name taken
    results = model.train(**SETTINGS, shares="5,3")
    note(["rank", model.leader, sorted(results.results_dict), model.trainer.best.exists()])
    try:
        model.train(**SETTINGS)
    except InvalidInput:
        note("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "evener run"])
def test_every_rank_of_a_script_trains_once_and_goes_on_with_the_result(launcher: str, tmp_path: Path) -> None:
    plain = prepare(tmp_path / "plain", "train_from_yaml", is_plain=True)
    assert run_script([str(plain)], plain.parent).returncode == 0
    script = prepare(tmp_path / "ranks", "train_from_yaml", is_plain=False)
    script.write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    if launcher == "evener run":
        words = ["-m", "evener", "run", "--local-nodes", "1,0.5", str(script)]
    done = run_script(words, script.parent, EVENER_SECRET="a secret of these ranks")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in seen(script.parent)]
    ranks = [line for line in lines if line[0] == "rank"]
    assert sorted(leads for _, leads, _, _ in ranks) == [False, True]
    assert [(names, has_best) for _, _, names, has_best in ranks] == [(ranks[0][2], True)] * 2
    assert "metrics/mAP50(B)" in ranks[0][2]
    assert (lines.count("once"), lines.count("refused")) == (1, 2)
    require_same_results(script.parent, plain.parent)


CALLBACK = """
from evener.yolo import YOLO
from settings import SETTINGS


def change(trainer):
    {change}


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("{event}", change)
    model.train(**SETTINGS, nodes="1,1", shares="5,3")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "change", "named"),
    [
        ("on_train_start", "next(trainer.model.parameters()).requires_grad = False", "which weights are trained"),
        ("on_train_batch_start", "[group.update(lr=0.1) for group in trainer.optimizer.param_groups]", "the optimizer"),
        ("on_train_epoch_start", "trainer.epochs += 1", "the number of epochs"),
        ("on_fit_epoch_end", "trainer.args.box = 1.0", "settings"),
    ],
)
def test_callback_that_changes_the_training_of_one_node_is_refused(
    event: str, change: str, named: str, tmp_path: Path
) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    script.write_text(CALLBACK.format(event=event, change=change))
    done = run_script([str(script)], script.parent)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("evener.records.errors.InvalidInput: a callback changed")
    assert named in last


STOP = """
from evener.yolo import YOLO
from settings import SETTINGS, note


def stop(trainer):
    note(trainer.epoch)
    trainer.stop = True


if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    model.add_callback("{event}", stop)
    model.train(**SETTINGS | {{"batch": 3}}, val={val}, nodes="1,1", shares="2,1")
    note(len(model.trainer.csv.read_text().splitlines()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("val", [True, False])
@pytest.mark.parametrize("event", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"])
def test_callback_stops_all_nodes_at_the_end_of_the_epoch(event: str, val: bool, tmp_path: Path) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    script.write_text(STOP.format(event=event, val=val))
    done = run_script([str(script)], script.parent)
    assert done.returncode == 0, done.stderr
    batches = 1 if event == "on_train_epoch_end" else 3
    assert seen(script.parent) == ["0"] * batches + ["2"]  # one line below the head


CELLS = """
from pathlib import Path

from evener.yolo import YOLO
from settings import SETTINGS
from ultralytics.models.yolo.detect import DetectionTrainer

assert "__file__" not in globals()


class Mine(DetectionTrainer):
    pass


def after_epoch(trainer):
    with Path("seen.txt").open("a") as file:
        file.write(f"{trainer.epoch} {isinstance(trainer, Mine)}\\n")


model = YOLO("yolov8n.yaml")
model.add_callback("on_fit_epoch_end", after_epoch)
results = model.train(trainer=Mine, nodes="1,0.5", shares="5,3", **SETTINGS)
assert "metrics/mAP50(B)" in results.results_dict
"""


@pytest.mark.slow
def test_callbacks_and_trainers_of_a_notebook_lie_in_no_file(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", "train_from_yaml", is_plain=True).parent
    done = run_script(["-c", CELLS], folder)
    assert done.returncode == 0, done.stderr
    assert seen(folder) == ["0 True", "1 True", "2 True", "3 True"]


REFUSED = {
    "device=0": "there is no GPU 0 here",
    "device=[0, 1]": "there is no GPU 0 here",
    "device=[0], nodes='1,1'": "name nodes twice",
    "trainer='mine'": "trainer must be a trainer class",
    "cfg='mine.yaml'": "name its settings one by one",
    "device='cpu', nodes='1,1'": "name nodes twice",
    "nodes='1,2'": "--local-nodes",
    "nodes='1,1', rect=True": "rect=True does not go with Evener",
    "nodes='1,1', time=1": "time=1 does not go with Evener",
    "nodes='1,1', batch=1.5": "batch must be a number",
    "nodes='1,1', imgsize=64": "imgsize",
    "nodes='1,1', resume=True": "holds no training to resume",
    "nodes='1,1', resume='there/last.pt'": "no checkpoint to go on from at there/last.pt",
    "nodes='1,1', data=['a.yaml', 'b.yaml']": "several data sets",
    "nodes='1,1', augmentations=(one for one in ())": "cannot be sent to the nodes' processes",
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", REFUSED)
def test_unsupported_argument_is_refused_in_one_sentence(arguments: str, tmp_path: Path) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    call = "from evener.yolo import YOLO\nYOLO('yolov8n.yaml').train(**{'data': 'data/data.yaml', **dict(%s)})\n"
    script.write_text(call % arguments)
    done = run_script([str(script)], script.parent)
    assert done.returncode != 0
    assert "InvalidInput" in done.stderr.splitlines()[-1] or "InvalidValue" in done.stderr.splitlines()[-1], done.stderr
    assert REFUSED[arguments] in done.stderr.splitlines()[-1]
    assert not (script.parent / "runs").exists()


LOST_LEADER = """
import os
import signal
from pathlib import Path

from evener.yolo import YOLO
from settings import SETTINGS, note
from ultralytics import settings


def die(trainer):
    if trainer.epoch == 1 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings.update({"tensorboard": True})
    model = YOLO("yolov8n.yaml")
    model.add_callback("on_train_start", lambda trainer: note("begins"))
    model.add_callback("on_train_batch_start", die)
    model.add_callback("on_fit_epoch_end", lambda trainer: note(trainer.epoch))
    model.train(**SETTINGS | {"epochs": 4}, nodes="1,1", shares="5,3", node_patience=5)
    note(type(model.metrics).__name__)
"""


@pytest.mark.slow
def test_next_leader_goes_on_with_callbacks_and_trackers(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    script.write_text(LOST_LEADER)
    done = run_script([str(script)], script.parent)
    assert done.returncode == 0, done.stderr
    assert (script.parent / "died").exists()
    assert seen(script.parent) == ['"begins"', "0", "1", "2", "3", "4", '"DetMetrics"']
    steps = set[int]()
    for file in (script.parent / "runs" / "train").glob("events.out.tfevents*"):
        one = accumulators.EventAccumulator(str(file)).Reload()
        steps |= {scalar.step for scalar in one.Scalars("metrics/mAP50(B)")}
    assert steps == {1, 2, 3, 4, 5}


RESTART = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from evener.frontends.yolo.model import _chosen
from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.settings import YoloTraining
from evener.records.record import Event

settings = {"data": "data/data.yaml", "imgsz": 320, "resume": False, "save_dir": "run"}
lost = (Event(step=3, kind="node lost", message="node-1 ended", nodes=("node-1",)),)
for words in (["model=yolov8n.pt", "imgsz=320"], [f"resume={sys.argv[1]}"]):
    model = SimpleNamespace(overrides={"imgsz": 640, "model": "yolov8n.pt"}, task="detect")
    config = YoloConfig(overrides=("train", *words, "save_dir=run"), lost=lost)
    chosen = _chosen(YoloTraining(model, settings, Path()), config)
    print(json.dumps([chosen.settings, model.overrides, str(chosen.folder)]))
"""


@pytest.mark.slow
def test_run_that_begins_again_without_a_node_keeps_its_settings(tmp_path: Path) -> None:
    last = tmp_path / "last.pt"
    last.touch()
    (tmp_path / "home").mkdir()
    done = run_script(["-c", RESTART, str(last)], tmp_path)
    assert done.returncode == 0, done.stderr
    from_start, from_checkpoint = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    same = {"data": "data/data.yaml", "imgsz": 320, "resume": False, "save_dir": "run"}
    assert from_start == [same, {"imgsz": 640, "model": "yolov8n.pt"}, "run"]
    assert from_checkpoint == [
        {"resume": str(last), "save_dir": "run"},
        {"model": str(last), "task": "detect"},  # sizes and data are those of the checkpoint
        "run",
    ]
