"""`YOLO.train(home=...)`: scripts for Ultralytics on the nodes of a master, with their callbacks and trainers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster
from support.yolo_cases import needs_ultralytics
from support.yolo_commands import ENVIRONMENT
from support.yolo_scripts import DOUBLE, NAMES, prepare, require_same_results, run_script, seen

pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(600)]
WITH_FILES = ("callback_keeps_checkpoints", "named_run", "resume")
"""Scripts with files besides the results, which stay on the leading node or are refused."""


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A master with two nodes."""
    for name, value in {**ENVIRONMENT, "PYTHONPATH": DOUBLE, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    with cluster("--patience", "10") as one:
        monkeypatch.setenv("YOLO_CONFIG_DIR", str(one.folder))
        for name in ("one", "two"):
            one.join(name)
        one.wait_for_nodes()
        yield one
        one.down()


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITH_FILES)))
def test_script_on_the_nodes_of_a_master_has_the_results_of_plain_ultralytics(
    name: str, ps: Cluster, tmp_path: Path
) -> None:
    plain, nodes = tmp_path / "plain", tmp_path / "nodes"
    done = run_script([str(prepare(plain, name, is_plain=True))], plain)
    assert done.returncode == 0, done.stderr
    script = prepare(nodes, name, is_plain=False, nodes=f"home={str(ps.home)!r}, shares='5,3'")
    done = run_script([str(script)], nodes)
    assert done.returncode == 0, done.stderr
    assert seen(nodes) == seen(plain)
    require_same_results(nodes, plain)
    (*_, record) = sorted((nodes / "runs").rglob("record.json"))
    assert [node.name for node in read_noun(record, TrainRecord).nodes] == ["one", "two"]


OWN_CODE = """
import helpers
from settings import SETTINGS, note

from evener.yolo import YOLO

if __name__ == "__main__":
    model = YOLO("small.yaml")
    model.add_callback("on_fit_epoch_end", helpers.after_epoch)
    model.train(trainer=helpers.NarrowTrainer, home={home!r}, shares="5,3", **SETTINGS)
    note([type(model.model).__module__, len(model.metrics.box.maps), type(model.metrics.curves_results).__name__])
    note([model.trainer.epoch, sorted(model.trainer.metrics)[:1], model.trainer.args.imgsz])
"""
HELPERS = """
from settings import note
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import DetectionModel


class Narrow(DetectionModel):
    pass


class NarrowTrainer(DetectionTrainer):
    def get_model(self, cfg=None, weights=None, verbose=True):
        model = Narrow(cfg, nc=self.data["nc"], ch=self.data["channels"], verbose=False)
        if weights:
            model.load(weights)
        return model


def after_epoch(trainer):
    note([trainer.epoch, type(trainer.model).__name__, trainer.train_loader.dataset.augment])
"""


def test_modules_beside_the_script_and_a_model_of_its_own_are_sent(ps: Cluster, tmp_path: Path) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    (script.parent / "helpers.py").write_text(HELPERS)
    description = script.parent / "small.yaml"
    typed = "import sys, yaml; from ultralytics.nn.tasks import yaml_model_load as read; " + (
        "yaml.safe_dump({**read('yolov8n.yaml'), 'yaml_file': None}, open(sys.argv[1], 'w'))"
    )
    assert run_script(["-c", typed, str(description)], script.parent).returncode == 0
    script.write_text(OWN_CODE.format(home=str(ps.home)))
    done = run_script([str(script)], script.parent)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in seen(script.parent)]
    assert lines[:3] == [[epoch, "DistributedModel", True] for epoch in range(3)]
    assert lines[-2:] == [["helpers", 2, "list"], [2, ["metrics/mAP50(B)"], 64]]


BY_THEMSELVES = """
from settings import SETTINGS, note

from evener.yolo import YOLO

if __name__ == "__main__":
    model = YOLO("yolov8n.yaml")
    settings = {{name: value for name, value in SETTINGS.items() if name not in ("nbs", "seed")}}
    results = model.train(agreement="average", seed=5, **{where}, **{{**settings, "batch": 4, "plots": False}})
    note([type(results).__name__, model.record.seed, model.trainer.args.seed, model.trainer.best.exists()])
"""


@pytest.mark.parametrize("where", ["home", "nodes"])
def test_nodes_of_a_script_train_by_themselves(where: str, ps: Cluster, tmp_path: Path) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    places = {"home": {"home": str(ps.home)}, "nodes": {"nodes": "1,0.5"}}
    script.write_text(BY_THEMSELVES.format(where=places[where]))
    done = run_script([str(script)], script.parent)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in seen(script.parent)] == [["DetMetrics", 5, 5, True]]


REFUSED = {
    "home={home!r}, nodes='1,1'": "a master has nodes of its own",
    "home={home!r}, agreement='average', trainer=DetectionTrainer": "trainer of your own do not go with",
    "home={home!r}, agreement='average', nbs=8": "every batch of a node is a step",
    "home={home!r}, pretrained='other.pt'": "name these weights as the model",
    "home={home!r}, save_period=1": "best.pt and last.pt come back",
    "home={home!r}, local_steps=5": "--local-steps belongs to --agreement",
    "home={home!r}, stationary=True": "--stationary",
    "master='127.0.0.1:1', token='x'": "a token begins with",
    "token='x', token_file='y'": "--token",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_unsupported_argument_on_a_master_is_refused_in_one_sentence(arguments: str, tmp_path: Path) -> None:
    script = prepare(tmp_path / "run", "train_from_yaml", is_plain=False)
    script.write_text(
        "from evener.yolo import YOLO\nfrom ultralytics.models.yolo.detect import DetectionTrainer\n"
        f"YOLO('yolov8n.yaml').train(data='data/data.yaml', project={str(tmp_path / 'runs')!r}, "
        f"{arguments.format(home=str(tmp_path / 'home'))})\n"
    )
    done = run_script([str(script)], script.parent)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("evener."), done.stderr
    assert REFUSED[arguments] in done.stderr.splitlines()[-1]
