"""A node on a system without POSIX (simulated: `support.foreign_system`) of a master on Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from support import foreign_system
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import TINY

SMOOTH = str(Path(TINY).with_name("smooth.py"))
POINTS = str(Path(TINY).with_name("points.py"))


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def foreign(*words: str, cwd: Path, libraries: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `evener WORDS` on such a system to its end."""
    typed = [sys.executable, foreign_system.__file__, libraries, "evener", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(typed, cwd=cwd, capture_output=True, text=True, timeout=90, check=False, env=environment)


def nodes_of(ps: Cluster, folder: str) -> set[str]:
    record = json.loads((ps.folder / folder / "record.json").read_text())
    return {node["name"] for node in record["nodes"]}


@pytest.mark.parametrize("security", ["tls", pytest.param("insecure", marks=pytest.mark.slow)])
def test_foreign_node_and_linux_node_train_what_one_process_trains(tmp_path: Path, security: str) -> None:
    words: dict[str, Any] = {"precision": "fp64", "option": {"optimizer": "sgd"}, "epochs": 1, "seed": 3}
    perform(RunConfig(task=SMOOTH, output=tmp_path / "alone", **words))
    is_insecure = ("--insecure",) * (security == "insecure")
    with cluster(*is_insecure) as ps:
        ps.join("pc", *is_insecure, foreign="torch")
        ps.join("box", *is_insecure)
        ps.wait_for_nodes()
        typed = ("--option", "optimizer=sgd", "--epochs", "1", "--seed", "3", "--precision", "fp64")
        ps.train(SMOOTH, "--agreement", "sync", *typed, "--output", "together")
        assert nodes_of(ps, "together") == {"pc", "box"}
        folders = (tmp_path / "alone", ps.folder / "together")
        alone, together = (load_file(folder / "model.safetensors") for folder in folders)
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-10


def test_foreign_thin_node_comes_back_to_a_restarted_master() -> None:
    with cluster("--patience", "4") as ps:
        ps.join("pc", "--thin", foreign="")
        ps.wait_for_nodes()
        ps.master.kill()
        ps.master.wait()
        ps.up()
        wait_until(lambda: ps.state("pc") == "present", "that the node is back")
        ps.train(POINTS, "--agreement", "average", "--epochs", "2", "--output", "thin", has_torch=False)
        assert nodes_of(ps, "thin") == {"pc"}
        ps.down()
        assert ps.nodes["pc"].wait(30) == 0


@pytest.mark.slow
def test_foreign_node_takes_no_part_in_ranks() -> None:
    with cluster() as ps:
        ps.join("pc", foreign="torch")
        ps.join("box")
        ps.wait_for_nodes()
        ps.train(TINY, "--epochs", "1", "--output", "ranks")
        assert nodes_of(ps, "ranks") == {"box"}
        assert "--agreement sync" in ps.said("pc.out")


@pytest.mark.slow
def test_foreign_system_trains_on_one_device_and_reports(tmp_path: Path) -> None:
    train = ("train", TINY, "--epochs", "1", "--devices", "cpu", "--output", "out")
    for words in (train, ("report", "out"), ("doctor",)):
        result = foreign(*words, cwd=tmp_path, libraries="torch")
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("up", "--home", "home"),
        ("train", TINY, "--local-nodes", "1,1"),
        pytest.param(("train", SMOOTH, "--local-nodes", "1,1", "--agreement", "sync"), marks=pytest.mark.slow),
        pytest.param(
            ("tune", POINTS, "--thin", "--local-nodes", "1,1", "--vary", "lr=1e-3..1:log"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda words: words[0],
)
def test_what_a_foreign_system_cannot_do_is_refused_in_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = foreign(*words, cwd=tmp_path, libraries="torch")
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "needs Linux or macOS" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["train", pytest.param("run", marks=pytest.mark.slow)])
def test_rank_of_torchrun_on_a_foreign_system_is_refused_in_one_sentence(tmp_path: Path, command: str) -> None:
    (tmp_path / "program.py").write_text("import evener\nevener.join()\n")
    file = TINY if command == "train" else "program.py"
    result = foreign(command, file, cwd=tmp_path, libraries="torch", **TORCHRUN)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "needs Linux or macOS" in " ".join(result.stderr.split())


@pytest.mark.alone
def test_thin_node_is_imported_quickly_without_posix_modules() -> None:
    folder = Path(foreign_system.__file__).parents[1]
    code = f"""
import sys, time
begun = time.perf_counter()
import numpy, psutil  # as they are, since the simulated system imports them before
seconds = time.perf_counter() - begun
sys.path.append({str(folder)!r})
from support.foreign_system import leave_posix
leave_posix()
begun = time.perf_counter()
import evener.commands.join
print(seconds + time.perf_counter() - begun, "torch" in sys.modules)
"""
    typed = [sys.executable, "-c", code]
    results = [subprocess.run(typed, capture_output=True, text=True, check=True).stdout.split() for _ in range(7)]
    assert {has_torch for _, has_torch in results} == {"False"}
    assert min(float(seconds) for seconds, _ in results) < 0.3
