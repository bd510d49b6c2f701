"""Trainings of YOLO on nodes that die or are stopped: what is said, and what goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.commands import command
from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT

pytestmark = [needs_ultralytics, pytest.mark.slow]
LONGEST = 200.0
"""Seconds that anything may take beside busy processes."""


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder)}
    return subprocess.Popen(
        command(*words), cwd=folder, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def wait_until(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LONGEST
    while not found() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert process.poll() is None, process.communicate()[1]
    assert found()


def nodes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a command's nodes, in the order in which they were started: all have one parent, its child."""
    return [one for one in psutil.Process(process.pid).children(recursive=True) if one.ppid() != process.pid]


def test_a_killed_node_is_named_in_one_sentence(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data")
    words = f"model=yolov8n.yaml data={data} imgsz=64 batch=4 plots=False epochs=500 project={tmp_path} name=run"
    process = started(
        tmp_path, "yolo", "train", *words.split(), "--local-nodes", "1,1", "--patience", "5"
    )  # fmt: skip
    wait_until((tmp_path / "run" / "results.csv").exists, process)
    nodes_of(process)[1].kill()
    _, told = process.communicate(timeout=LONGEST)
    assert process.returncode == 4, told
    assert "Traceback" not in told
    assert re.match(r"evener: node node-\d \(rank \d\) was killed by signal 9", told.splitlines()[-1]), told


def test_ctrl_c_ends_nodes_that_train_by_themselves(tmp_path: Path) -> None:
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
