"""`up`, `join`, `train yolov8n.yaml` without an agreement: a YOLO on the nodes of a master, which go and come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from evener.record import TrainRecord
from evener.schema import read_noun
from support.command_cluster import Cluster, cluster, wait_until
from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, read_by_plain_yolo

pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(300)]
EPOCHS, IMAGES = 60, 12
OPTIONS = ("imgsz=64", "plots=False", "val=False", "optimizer=SGD", "name=run")


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with cluster("--patience", "6") as one:
        monkeypatch.setenv("YOLO_CONFIG_DIR", str(one.folder))
        for name in ("one", "two"):
            one.join(name)
        one.wait_for_nodes()
        yield one
        one.down()


def process_on(ps: Cluster, name: str) -> int:
    """Of the rank there."""
    servers = [one for one in psutil.Process(ps.nodes[name].pid).children() if "forkserver" in " ".join(one.cmdline())]
    return int(next(rank.pid for server in servers for rank in server.children()))


@pytest.mark.parametrize("words", [(), ("--ship-data",)], ids=["data on every node", "data sent"])
def test_nodes_of_a_master_train_together_and_outlive_each_other(ps: Cluster, words: tuple[str, ...]) -> None:
    data = draw_detection(ps.folder / "data", count=IMAGES)
    if words:  # as data lie that are to be sent: beside their description
        data.write_text(data.read_text().replace(str(data.parent), "."))
    training = ps.start_training(
        "yolov8n.yaml", "--data", str(data), "--epochs", str(EPOCHS), "--batch-size", "4", "--shares", "2,1",
        *(word for one in OPTIONS for word in ("--option", one)), "--option", f"project={ps.folder}", *words,
    )  # fmt: skip
    shown = ps.folder / "train.out"
    wait_until(lambda: ps.version() > 4 or training.poll() is not None, "that batches are computed")
    assert training.poll() is None, ps.said("train") + shown.read_text()[-2500:]
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    ps.join("three")
    wait_until(lambda: "three came" in shown.read_text() or training.poll() is not None, "that the new node comes")
    assert training.wait(200) == 0, ps.said("train") + shown.read_text()[-2500:]
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == EPOCHS * IMAGES
    told = [event.message for event in record.events if event.kind in ("node lost", "joined")]
    assert told[0].startswith("one was killed by signal 9 (SIGKILL); 1 node of 2 go on with step ")
    assert [node.name for node in record.nodes] == ["one", "two", "three"]
    assert record.nodes[2].share > 0
    lines = (ps.folder / "run" / "results.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, EPOCHS + 1))
    (ps.folder / "home").mkdir(exist_ok=True)
    for name in ("best.pt", "last.pt"):
        read_by_plain_yolo(ps.folder / "run" / "weights" / name, ps.folder)


def test_a_node_with_other_images_does_not_take_part(ps: Cluster) -> None:
    data = draw_detection(ps.folder / "data", count=IMAGES)
    other = draw_detection(ps.folder / "other", count=IMAGES - 1)
    other.write_text(other.read_text().replace(str(other.parent), "nowhere"))
    training = ps.start_training(
        "yolov8n.yaml", "--data", str(data), "--epochs", str(EPOCHS), "--batch-size", "4", "--shares", "2,1",
        *(word for one in OPTIONS for word in ("--option", one)), "--option", f"project={ps.folder}",
    )  # fmt: skip
    wait_until(lambda: ps.version() > 4 or training.poll() is not None, "that batches are computed")
    ps.join("three", "--data", str(other.parent))
    told = "node three cannot take part: node three has 11 images to train with, node one has 12 images"
    shown = ps.folder / "train.out"
    wait_until(lambda: told in shown.read_text() or training.poll() is not None, "that it is declined")
    assert told in shown.read_text()
    assert training.wait(200) == 0, ps.said("train")
