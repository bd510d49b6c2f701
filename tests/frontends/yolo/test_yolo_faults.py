"""Trainings of YOLO on nodes that die or are stopped: what is said, and what goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from evener.records.errors import NodeLost
from evener.records.record import TrainRecord
from support.commands import command
from support.two_machines import on_two_machines
from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, read_by_plain_yolo, yolo

pytestmark = [needs_ultralytics, pytest.mark.slow]
LONGEST = 200.0
"""Seconds that anything may take beside busy processes."""
PATIENCE = 5
LATE = 5.0
"""Seconds that a busy machine may come late."""


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder)}
    return subprocess.Popen(
        command(*words), cwd=folder, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def wait_until(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LONGEST
    while not (is_found := found()) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert process.poll() is None, process.communicate()[1]
    assert is_found  # once: processes that start come and go


def nodes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a command's nodes, in the order in which they were started: all have one parent, its child."""
    return [one for one in psutil.Process(process.pid).children(recursive=True) if one.ppid() != process.pid]


def trained(folder: Path, epochs: int, *options: str) -> subprocess.Popen[str]:
    """A training on two nodes that has ended its first epoch."""
    return past_an_epoch(
        folder, started(folder, "yolo", *words_of(folder, epochs), *options, "--patience", str(PATIENCE))
    )


def words_of(folder: Path, epochs: int) -> list[str]:
    data = draw_detection(folder / "data")
    words = f"train model=yolov8n.yaml data={data} imgsz=64 batch=4 plots=False epochs={epochs}"
    return [*words.split(), f"project={folder}", "name=run"]


def past_an_epoch(folder: Path, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    wait_until((folder / "run" / "weights" / "last.pt").exists, process)
    return process


def epochs_of(folder: Path) -> list[int]:
    """Those that the table of results has."""
    return [int(line.split(",")[0]) for line in (folder / "run" / "results.csv").read_text().splitlines()[1:]]


def test_killed_node_is_named_and_the_last_epoch_can_be_resumed(tmp_path: Path) -> None:
    process = trained(tmp_path, 12, "--local-nodes", "1,1", "--no-elastic")
    begin = time.monotonic()
    nodes_of(process)[1].kill()
    _, told = process.communicate(timeout=LONGEST)
    assert time.monotonic() - begin < PATIENCE + 5 + LATE
    assert process.returncode == 4, told
    assert "Traceback" not in told
    assert re.match(r"evener: node node-\d \(rank \d\) was killed by signal 9", told.splitlines()[-1]), told
    again = yolo(
        "yolo", "train", "resume", f"model={tmp_path / 'run/weights/last.pt'}", "--local-nodes", "1", cwd=tmp_path
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert epochs_of(tmp_path) == list(range(1, 13))


def hear_of_a_loss(process: subprocess.Popen[str], begin: float) -> str:
    """What is said up to that, which is said in time."""
    assert process.stderr is not None
    said: list[str] = []
    while not said or "node lost" not in said[-1]:
        said.append(process.stderr.readline())
        assert said[-1], said
    assert time.monotonic() - begin < PATIENCE + 5 + LATE
    return "".join(said)


def assert_complete(folder: Path, process: subprocess.Popen[str], told: str, epochs: int) -> TrainRecord:
    """The training ends with all that belongs to one; its record."""
    told += process.communicate(timeout=LONGEST)[1]
    assert process.returncode == 0, told
    assert "Traceback" not in told
    assert epochs_of(folder) == list(range(1, epochs + 1))
    read_by_plain_yolo(folder / "run" / "weights" / "last.pt", folder)
    return msgspec.json.decode((folder / "run" / "record.json").read_bytes(), type=TrainRecord)


@pytest.mark.parametrize(("rank", "how"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_remaining_nodes_continue_after_a_loss(tmp_path: Path, rank: int, how: signal.Signals) -> None:
    process = trained(tmp_path, 14, "--local-nodes", "1,1,1", "--shares", "3,2,1", "--json")
    begin = time.monotonic()
    nodes_of(process)[rank].send_signal(how)
    record = assert_complete(tmp_path, process, hear_of_a_loss(process, begin), 14)
    assert (record.events[0].kind, record.events[0].nodes) == ("node lost", (f"node-{rank}",))
    assert "2 nodes of 3 go on with step" in record.events[0].message
    assert sum(step.samples for step in record.steps) == 14 * 8  # none was lost, or used twice


PROGRAM = """
import sys
from evener.launch.nodes import parse_local_nodes
from evener.launch.ranks import run_local
from evener.frontends.yolo.command import _folder_of, _shown, without
from evener.frontends.yolo.rank import yolo_rank
from evener.frontends.yolo.overrides import YoloConfig

def perform(config, show):
    run_local(yolo_rank, parse_local_nodes("1,1,1"), config, patience=5, on_event=show, without=without)

if __name__ == "__main__":
    config = YoloConfig(overrides=tuple(sys.argv[1:]), shares="3,2,1", to_stderr=True)
    _shown(config, _folder_of(config), perform)
"""
"""As GPUs are started, whose collectives cannot be left."""


def test_nodes_with_fixed_collectives_restart_from_the_last_epoch(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(tmp_path)}
    words = [sys.executable, str(script), *words_of(tmp_path, 14)]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    past_an_epoch(tmp_path, process)
    begin = time.monotonic()
    nodes_of(process)[1].kill()
    record = assert_complete(tmp_path, process, hear_of_a_loss(process, begin), 14)
    assert (record.events[0].kind, record.events[0].nodes) == ("node lost", ("node-1",))
    assert [node.name for node in record.nodes] == ["node-0", "node-2"]


def test_ctrl_c_ends_nodes_that_train_independently(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"train yolov8n.yaml --data {data} --epochs 500 --batch-size 4 --agreement average --local-nodes 1,1"
    options = f"imgsz=64 plots=False project={tmp_path} name=run"
    process = started(tmp_path, *words.split(), *(word for one in options.split() for word in ("--option", one)))
    wait_until(lambda: len(nodes_of(process)) == 3, process)
    nodes = nodes_of(process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LONGEST)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    psutil.wait_procs(nodes, timeout=LONGEST)
    assert not any(node.is_running() for node in nodes)


def test_first_machine_names_data_missing_on_the_second(tmp_path: Path) -> None:
    draw_detection(tmp_path / "0" / "data")
    words = "-m evener yolo train model=yolov8n.yaml data=data/data.yaml imgsz=64 batch=4 epochs=2 plots=False name=run"
    variables = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *sys.path]),
        "YOLO_CONFIG_DIR": str(tmp_path),
    }
    (code, told), _ = on_two_machines(words.split(), tmp_path, variables)
    assert code == NodeLost.exit_code, told
    assert "(rank 1) failed: Ultralytics: Dataset" in told
    assert "Traceback" not in told
