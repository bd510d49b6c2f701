"""docs/yolo.md from its first line, in an environment that has nothing: what it says to install, then its commands."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

from support.yolo_cases import draw_detection, needs_ultralytics
from support.yolo_commands import ENVIRONMENT, TESTS

pytestmark = [needs_ultralytics, pytest.mark.slow, pytest.mark.timeout(2400)]
PAGE = TESTS.parent / "docs" / "yolo.md"
SMALL = {
    "evener yolo": "epochs=2 imgsz=64",
    "evener train": "--epochs 2 --option imgsz=64",
    "torchrun": "epochs=2 imgsz=64",
}
"""What is typed behind a command, by its first words."""


OF_THE_TESTS = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST")
"""Variables that no reader has; by the last one Ultralytics would put results into a folder of its own tests."""


def lines_of(page: str) -> list[str]:
    """Everything that a page says to type, in order, without remarks."""
    lines = page.replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.startswith("    ")]


LINES = lines_of(PAGE.read_text())
OF_THIS_MACHINE = [
    line
    for line in LINES
    if line.startswith("evener ") and ".yaml" in line and ".pt" not in line and "--home" not in line
]
"""Commands for nodes of this machine, that nobody has to be asked for weights for."""


def small(line: str) -> list[str]:
    return [*line.split(), *next(words for first, words in SMALL.items() if line.startswith(first)).split()]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs: the page's first line was typed there, in the versions of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=True)
    versions = {one.name: one.version for one in distributions() if one.name.lower() not in ("evener", "pip")}
    same = folder / "constraints.txt"
    same.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    assert LINES[0] == "pip install -c constraints.txt -e .[ultralytics]"
    programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    project = f"{TESTS.parent}[ultralytics]"
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", "-c", same, project], check=True)
    return programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the reader types, beside his data."""
    draw_detection(tmp_path / "data", count=16).rename(tmp_path / "my-data.yaml")
    return tmp_path


def start(words: list[str], programs: Path, folder: Path) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    paths = os.pathsep.join([str(TESTS / "support" / "torchvision_site"), str(TESTS)])
    own = {**ENVIRONMENT, "PYTHONPATH": paths, "YOLO_CONFIG_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    own["EVENER_SECRET"] = "0123456789abcdef" * 2  # as the page says, before torchrun
    own["GLOO_SOCKET_IFNAME"] = "lo"  # its two machines are this one
    return subprocess.Popen(
        [str(programs / words[0]), *words[1:]],
        cwd=folder,
        env={**kept, **own, "PATH": f"{programs}{os.pathsep}{kept['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> None:
    _, told = process.communicate(timeout=600)
    assert process.returncode == code, told


def results(folder: Path) -> int:
    """Lines of the table of the training so far."""
    found = list(folder.glob("runs/detect/train/results.csv"))
    return len(found[0].read_text().splitlines()) if found else 0


def stop_after(lines: int, process: subprocess.Popen[str], folder: Path) -> None:
    """Ctrl-C when the table of the training has more lines than so many."""
    while results(folder) <= lines and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    end(process, 130)


@pytest.mark.parametrize("line", OF_THIS_MACHINE, ids=["two nodes", "all devices", "other words", "average"])
def test_documented_commands_for_local_nodes_train(line: str, programs: Path, folder: Path) -> None:
    end(start(small(line), programs, folder))
    run = folder / "runs" / "detect" / "train"
    assert (run / "weights" / "best.pt").is_file()
    assert (run / "record.json").is_file()


def test_documented_commands_for_two_machines_train(programs: Path, folder: Path) -> None:
    (line,) = (line for line in LINES if line.startswith("torchrun"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    words = ["127.0.0.1" if word == "192.168.1.10" else port if word == "29500" else word for word in small(line)]
    second = list(words)
    second[second.index("--node-rank") + 1] = "1"
    both = [start(own, programs, folder) for own in (words, second)]
    for process in both:
        end(process)
    assert (folder / "runs" / "detect" / "train" / "weights" / "best.pt").is_file()


def test_documented_resume_command_continues_training(programs: Path, folder: Path) -> None:
    line = next(line for line in LINES if line.startswith("evener yolo") and "my-data" in line)
    stop_after(2, start([*line.split(), "epochs=300", "imgsz=64"], programs, folder), folder)
    before = results(folder)
    (again,) = (line for line in LINES if " resume " in line)
    stop_after(before + 1, start(again.split(), programs, folder), folder)
    assert results(folder) > before
