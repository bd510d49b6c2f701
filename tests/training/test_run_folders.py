"""Two runs never write into one folder, and nothing that a killed process left half-written stays in it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evener.records.errors import FolderInUse
from evener.system.file_lock import FolderLock
from evener.training.console import RunView, locked_folder
from support.commands import TINY, command, evener, evener_here

ENDLESS = str(Path(TINY).with_name("endless.py"))
DRAFTS = (".step-00000003.7.140000000000001", ".tmpAb12cD", ".model.safetensors.7.140000000000001")


@contextmanager
def trains(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`evener train` of an endless task in `folder`, which has begun; killed on the way out."""
    begun = command("train", ENDLESS, *words)
    process = subprocess.Popen(begun, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "run" / "plan.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def draft_names(folder: Path) -> list[str]:
    """Hidden files and folders below `folder`."""
    return [path.name for path in folder.rglob(".*")]


def test_second_run_in_a_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with RunView(tmp_path) as first, pytest.raises(FolderInUse) as refused:
        RunView(tmp_path)
    first.console.print()
    assert refused.value.folder == str(tmp_path)
    assert refused.value.holder.startswith(f"process {os.getpid()} on ")
    with RunView(tmp_path):
        pass
    assert draft_names(tmp_path) == []


def test_shared_checkpoint_folder_is_locked_by_one_run(tmp_path: Path) -> None:
    for name in ("a", "b", "checkpoints"):
        (tmp_path / name).mkdir()
    with RunView(tmp_path / "a", checkpoints=tmp_path / "checkpoints"):
        with pytest.raises(FolderInUse) as refused:
            RunView(tmp_path / "b", checkpoints=tmp_path / "checkpoints")
        assert refused.value.folder == str(tmp_path / "checkpoints")


def test_non_leader_rank_needs_no_lock(tmp_path: Path) -> None:
    with RunView(tmp_path), RunView(tmp_path, is_leader=False):
        pass


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with FolderLock(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert draft_names(tmp_path) == [".lock"]
    FolderLock(tmp_path).release()
    assert draft_names(tmp_path) == []


def test_forked_process_does_not_extend_the_lock_of_its_parent(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with FolderLock(tmp_path):
            loader = os.fork()
            if loader == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(loader).encode())
            time.sleep(60)
            os._exit(0)
    loader = int(os.read(reading, 100))
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(loader, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_empty_new_folder_is_removed_after_its_lock(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "empty") as empty, pytest.raises(FolderInUse), locked_folder(empty):
        pass
    with locked_folder(tmp_path / "full") as full:
        (full / "table.csv").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "table.csv"]


COMMANDS = (
    ("train", TINY, "--output", "run"),
    ("train", TINY, "--output", "other", "--checkpoint", "run/checkpoints"),
    ("train", TINY, "--output", "run", "--agreement", "average", "--local-nodes", "1,1"),
    ("run", "--run-folder", "run", "program.py"),
    ("demo", "--output", "run"),
    ("tune", TINY, "--output", "run"),
    ("experiment", "nfnn", "--output", "run"),
    ("experiment", "resnet152-strategies", "--output", "run"),
    ("experiment", "gpipe", "--output", "run"),
    ("experiment", "scattered-gpus", "--output", "run", "program.py"),
)


@pytest.mark.slow
def test_no_command_writes_into_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import evener; evener.join()\n")
    with trains(tmp_path, "--output", "run", "--checkpoint", "run/checkpoints") as first:
        refused = evener(*COMMANDS[0], cwd=tmp_path)
        assert "Traceback" not in refused.stderr
        first.send_signal(signal.SIGSTOP)
        for result in (refused, *(evener_here(*words, cwd=tmp_path) for words in COMMANDS)):
            assert result.returncode == FolderInUse.exit_code, result.args
            assert f"process {first.pid} on " in result.stderr
        assert first.poll() is None


@pytest.mark.slow
def test_rank_killed_during_a_checkpoint_leaves_no_drafts(tmp_path: Path) -> None:
    (tmp_path / "killed_once.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "import evener.training.checkpoint as checkpoint\n"
        "from tiny import task\n"
        "sum_of = checkpoint._sum_of\n"
        "def kill_once(path):\n"
        "    mark = Path(__file__).with_name('killed')\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return sum_of(path)\n"
        "checkpoint._sum_of = kill_once\n"
    )
    words = ("--output", "run", "--local-nodes", "1,1", "--shares", "equal", "--checkpoint-every", "2")
    paths = [str(Path(TINY).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    result = evener("train", "killed_once.py", *words, cwd=tmp_path, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "killed").exists()
    assert draft_names(tmp_path / "run") == []


def test_resumed_run_removes_drafts_of_the_killed_one(tmp_path: Path) -> None:
    first = evener_here("train", TINY, "--output", "run", "--epochs", "1", "--checkpoint-every", "1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    for name in DRAFTS:
        (tmp_path / "run" / "checkpoints" / name).touch()
        (tmp_path / "run" / name).touch()
    words = ("--output", "run", "--epochs", "2", "--checkpoint-every", "1", "--resume")
    second = evener_here("train", TINY, *words, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert draft_names(tmp_path / "run") == []
