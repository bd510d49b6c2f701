"""`up`, `join`, `train yolov8n.yaml` without an agreement: a YOLO on the nodes of a master, which go and come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.accelerator import DEVICE, needs_device
from support.command_cluster import Cluster, cluster, wait_until
from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, TESTS, read_by_plain_yolo

pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(600)]
EPOCHS, IMAGES = 60, 12
RUN_SECONDS = 400
OTHER_DEVICE = "standin:1" if DEVICE.startswith("standin") else DEVICE
OPTIONS = ("imgsz=64", "plots=False", "val=False", "optimizer=SGD", "name=run")


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with cluster("--patience", "6") as one:
        monkeypatch.setenv("YOLO_CONFIG_DIR", str(one.folder))
        yield one
        one.down()


def join(ps: Cluster, *names: str) -> None:
    for name in names:
        ps.join(name)
    ps.wait_for_nodes()


def start(ps: Cluster, model: str, data: Path, *words: str, epochs: int = EPOCHS) -> Popen[bytes]:
    """A training, once its batches are computed."""
    training = ps.start_training(
        model, "--data", str(data), "--epochs", str(epochs), "--batch-size", "4", *words,
        *(word for one in OPTIONS for word in ("--option", one)), "--option", f"project={ps.folder}",
    )  # fmt: skip
    wait_until(lambda: ps.version() > 4 or training.poll() is not None, "that batches are computed")
    assert training.poll() is None, ended(ps)
    return training


def run_plain(ps: Cluster, script: str, *words: str) -> str:
    """What a program says that uses plain YOLO."""
    typed = [sys.executable, "-c", script, *words]
    found = subprocess.run(typed, cwd=ps.folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()[-1]


def make_first(ps: Cluster) -> Path:
    """A model to begin with, in a folder that nodes are not told of."""
    script = "import sys; from ultralytics import YOLO; YOLO('yolov8n.yaml').save(sys.argv[1]); print()"
    run_plain(ps, script, "first.pt")
    return ps.folder / "first.pt"


def weights_of(ps: Cluster, run: str, name: str) -> str:
    """Of a checkpoint, in short."""
    script = (
        "import hashlib, sys; from ultralytics import YOLO; tensors = YOLO(sys.argv[1]).model.state_dict().values();"
        "print(hashlib.sha256(b''.join(one.numpy().tobytes() for one in tensors)).hexdigest())"
    )
    return run_plain(ps, script, f"{run}/weights/{name}")


def shown(ps: Cluster) -> str:
    return (ps.folder / "train.out").read_text()


def ended(ps: Cluster) -> str:
    """What there is to read when a training has ended that should not have."""
    return ps.said("train") + shown(ps)[-2500:]


def wait_until_shown(ps: Cluster, training: Popen[bytes], words: str) -> None:
    wait_until(lambda: words in shown(ps) or training.poll() is not None, f"that {words!r} is shown")
    assert words in shown(ps), ended(ps)


def process_on(ps: Cluster, name: str) -> int:
    """Of the rank there."""
    servers = [one for one in psutil.Process(ps.nodes[name].pid).children() if "forkserver" in " ".join(one.cmdline())]
    return int(next(rank.pid for server in servers for rank in server.children()))


@pytest.mark.parametrize("words", [(), ("--ship-data",)], ids=["data on every node", "data sent"])
def test_nodes_of_a_master_train_together_and_survive_losses(ps: Cluster, words: tuple[str, ...]) -> None:
    join(ps, "one", "two")
    data = draw_detection(ps.folder / "data", count=IMAGES)
    assert str(data.parent) in data.read_text()  # where the nodes of this machine have images, too
    training = start(ps, "yolov8n.yaml", data, "--shares", "2,1", *words)
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    ps.join("three")
    wait_until_shown(ps, training, "three came")
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == EPOCHS * IMAGES
    told = [event.message for event in record.events if event.kind in ("node lost", "joined")]
    assert told[0].startswith("one was killed by signal 9 (SIGKILL); 1 node of 2 goes on with step ")
    assert [node.name for node in record.nodes] == ["one", "two", "three"]
    assert record.nodes[2].share > 0
    assert bool([*data.parent.rglob("*.cache")]) is not bool(
        words
    )  # Ultralytics writes them beside labels that it reads
    assert epochs_of(ps.folder / "run") == list(range(1, EPOCHS + 1))
    (ps.folder / "home").mkdir(exist_ok=True)
    for name in ("best.pt", "last.pt"):
        read_by_plain_yolo(ps.folder / "run" / "weights" / name, ps.folder)


def epochs_of(folder: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in (folder / "results.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize("words", [(), ("--agreement", "average")], ids=["ranks", "average"])
def test_training_that_reaches_no_master_leaves_no_folder(words: tuple[str, ...], ps: Cluster) -> None:
    data = draw_detection(ps.folder / "data", count=4)
    token = (ps.home / "tokens" / "submitter").read_text().strip()
    typed = ("train", "yolov8n.yaml", "--data", str(data), "--option", f"project={ps.folder}", "--option", "name=none")
    ran = ps.evener(*typed, *words, "--option", "imgsz=64", "--master", "127.0.0.1:1", "--token", token)
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert not (ps.folder / "none").exists()


def test_node_with_different_images_does_not_take_part(ps: Cluster) -> None:
    join(ps, "one", "two")
    data = draw_detection(ps.folder / "data", count=IMAGES)
    other = draw_detection(ps.folder / "other", count=IMAGES - 1)
    other.write_text(other.read_text().replace(str(other.parent), "nowhere"))
    training = start(ps, "yolov8n.yaml", data, "--shares", "2,1")
    ps.join("three", "--data", str(other.parent))
    told = "node three cannot take part: node three has 11 images to train with, node one has 12 images"
    wait_until_shown(ps, training, told)
    assert training.wait(RUN_SECONDS) == 0, ended(ps)


def test_node_with_which_batches_take_no_less_time_stays_out(ps: Cluster) -> None:
    join(ps, "one", "two")
    data = draw_detection(ps.folder / "data", count=IMAGES)
    training = start(ps, "yolov8n.yaml", data)
    ps.join("three", "--speed", "0.02")
    wait_until_shown(ps, training, "node three cannot take part: a step would not be shorter: ")
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == EPOCHS * IMAGES
    assert "three" not in {node.name for node in record.nodes}


@pytest.mark.alone  # beside other work the second node may not make batches shorter
def test_run_with_one_node_admits_another(ps: Cluster) -> None:
    join(ps, "one")
    data = draw_detection(ps.folder / "data", count=IMAGES)
    training = start(ps, "yolov8n.yaml", data, epochs=4 * EPOCHS)  # the next checkpoint may be 10 s away
    ps.join("two")
    wait_until_shown(ps, training, "two came")
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    assert "master lost" not in shown(ps)  # the result came over the connection that waited for it
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == 4 * EPOCHS * IMAGES
    assert sorted(node.samples for node in record.steps[-1].nodes) in ([1, 3], [2, 2])


def test_stopped_training_returns_its_results(ps: Cluster) -> None:
    join(ps, "one", "two")
    training = start(ps, "yolov8n.yaml", draw_detection(ps.folder / "data", count=IMAGES), epochs=20 * EPOCHS)
    wait_until(lambda: len(list((ps.home / "blobs").glob("[0-9a-f]*"))) == 2, "that a checkpoint comes")
    assert ps.evener("stop", "--home", str(ps.home)).returncode == 0
    assert training.wait(60) == 130, ended(ps)
    epochs = epochs_of(ps.folder / "run")
    assert 0 < len(epochs) < 20 * EPOCHS
    assert epochs == list(range(1, len(epochs) + 1))
    (ps.folder / "home").mkdir(exist_ok=True)
    for name in ("best.pt", "last.pt"):
        read_by_plain_yolo(ps.folder / "run" / "weights" / name, ps.folder)


def test_training_without_nodes_resumes_from_the_masters_checkpoint(ps: Cluster) -> None:
    """To the last bit, on one node: nothing is rounded otherwise there when it begins again."""
    join(ps, "one")
    data, epochs = draw_detection(ps.folder / "data", count=IMAGES), 2 * EPOCHS
    first = make_first(ps)
    training = start(ps, str(first), data, epochs=epochs)
    wait_until(lambda: len(list((ps.home / "blobs").glob("[0-9a-f]*"))) == 2, "that it lies there beside the program")
    before = ps.version()
    wait_until(lambda: ps.version() > before + 3, "that the disk has it")
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    wait_until_shown(ps, training, "begins again")
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert [event.kind for event in record.events if event.kind == "resumed"] == ["resumed"]
    assert [step.step for step in record.steps] == list(range(1, epochs * IMAGES // 4 + 1))
    assert epochs_of(ps.folder / "run") == list(range(1, epochs + 1))
    (ps.folder / "run").rename(ps.folder / "struck")
    assert start(ps, str(first), data, epochs=epochs).wait(200) == 0, ended(ps)
    for name in ("best.pt", "last.pt"):
        assert weights_of(ps, "struck", name) == weights_of(ps, "run", name), name


@pytest.fixture
def on_devices(ps: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A master whose nodes can compute on the device of the tests."""
    site = [str(TESTS / "support" / "standin_site")] if DEVICE.startswith("standin") else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*site, os.environ["PYTHONPATH"]]))
    return ps


@needs_device
def test_lone_accelerator_resumes_from_the_masters_checkpoint(on_devices: Cluster) -> None:
    ps = on_devices
    ps.join("one", "--device", DEVICE)
    ps.wait_for_nodes()
    training = start(ps, "yolov8n.yaml", draw_detection(ps.folder / "data", count=IMAGES), epochs=EPOCHS // 2)
    wait_until(lambda: len(list((ps.home / "blobs").glob("[0-9a-f]*"))) == 2, "that it lies there beside the program")
    before = ps.version()
    wait_until(lambda: ps.version() > before + 3, "that the disk has it")
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    wait_until_shown(ps, training, "begins again")
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert [event.kind for event in record.events if event.kind == "resumed"] == ["resumed"]
    assert [step.step for step in record.steps] == list(range(1, EPOCHS // 2 * IMAGES // 4 + 1))


@needs_device
def test_accelerators_of_one_machine_survive_losses(on_devices: Cluster) -> None:
    ps = on_devices
    ps.join("one", "--device", DEVICE)
    ps.join("two", "--device", OTHER_DEVICE)
    ps.wait_for_nodes()
    data = draw_detection(ps.folder / "data", count=IMAGES)
    training = start(ps, "yolov8n.yaml", data, "--shares", "2,1", epochs=EPOCHS // 4)
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    assert training.wait(RUN_SECONDS) == 0, ended(ps)
    record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == EPOCHS // 4 * IMAGES
    told = [event.message for event in record.events if event.kind == "node lost"]
    assert told[0].startswith("one was killed by signal 9 (SIGKILL); 1 node of 2 goes on with step ")
