"""Where nothing can be written, a command says so before it works, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.records.errors import CannotWrite, InvalidInput
from support.command_cluster import Cluster
from support.commands import TINY, evener_here
from support.full_disk import small_disk

PROGRAM = str(Path(TINY).parents[1] / "programs" / "scripts" / "regression.py")


@pytest.mark.parametrize(
    "words",
    [
        ("benchmark", "--output"),
        ("trace", TINY, "--output"),
        ("plan", "vgg16", "--machines", "v100", "--save"),
        ("report", "record.json", "--output"),
        ("demo", "--output"),
        ("up", "--home"),
        ("train", TINY, "--output"),
    ],
    ids=lambda words: words[0],
)
def test_output_below_a_file_is_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = evener_here(*words, "file/out", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("evener: cannot write into ")
    assert len(result.stderr.splitlines()) == 1


def test_folder_as_output_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = evener_here("trace", TINY, "--output", "folder", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "evener: cannot write folder: it is a folder; name a file in it\n")


def test_report_of_a_folder_reads_its_record(tmp_path: Path) -> None:
    result = evener_here("report", ".", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("evener: cannot read record.json")


@pytest.mark.parametrize(
    "words",
    [
        ("benchmark", "--output"),
        ("trace", TINY, "--output"),
        ("plan", "vgg16", "--machines", "v100", "--save"),
        ("demo", "--output"),
        ("train", TINY, "--output"),
        ("train", TINY, "--agreement", "average", "--local-nodes", "1,1", "--output"),
        ("tune", TINY, "--vary", "seed=1,2", "--trials", "2", "--output"),
        ("run", PROGRAM, "--run-folder"),
        ("init",),
        ("up", "--insecure", "--listen", "127.0.0.1:0", "--home"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_full_disk_gives_one_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        result = evener_here(*words, "disk/out.py", cwd=tmp_path)
    assert result.returncode in (InvalidInput.exit_code, CannotWrite.exit_code)
    assert "No space left on device" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "nodes",
    [(), pytest.param(("--local-nodes", "1,1"), marks=pytest.mark.slow)],
    ids=["this process", "local nodes"],
)
def test_disk_that_fills_up_costs_a_run_no_step(nodes: tuple[str, ...], tmp_path: Path) -> None:
    endless = str(Path(TINY).with_name("endless.py"))
    with small_disk(tmp_path / "disk") as disk:
        disk.fill(room=70_000)
        words = ("--output", "disk/run", "--epochs", "3", "--batch-size", "100", "--checkpoint-every", "5", *nodes)
        result = evener_here("train", endless, *words, cwd=tmp_path)
        kept = [path.name for path in (disk.folder / "run" / "checkpoints").glob("step-*")]
        assert not list(disk.folder.rglob(".*"))
    assert result.returncode == CannotWrite.exit_code, result.stdout
    assert "step 150  no checkpoint: " in result.stdout  # the last of three epochs of 50
    assert kept
    assert len(result.stderr.splitlines()) == 1


def test_killed_master_restarts_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        cluster = Cluster(tmp_path, home=disk.folder / "home")
        try:
            cluster.master.kill()
            cluster.master.wait()
            disk.fill()
            cluster.up()
            assert cluster.ask().nodes == ()
            refused = cluster.evener("invite", "--home", str(cluster.home), "--nodes", "1")
            assert "disk is full" in refused.stderr
            assert "Traceback" not in refused.stderr
        finally:
            cluster.close()
