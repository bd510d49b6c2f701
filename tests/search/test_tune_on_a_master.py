"""`evener tune` on the nodes of a master, with real processes, and its survival of killed processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_cluster import Cluster, cluster, wait_until
from support.commands import command, evener

pytest.importorskip("optuna", reason="needs the extra tune")

POINTS = str(Path(__file__).parents[1] / "support_tasks" / "points.py")
VARY = ("--vary", "lr=1e-3..1:log")


def tuned(ps: Cluster, name: str, *words: str, task: str = POINTS) -> Any:
    """Return the result of a search on the master's nodes."""
    typed = ("tune", task, "--home", str(ps.home), *VARY, *words, "--output", name, "--json")
    result = evener(*typed, cwd=ps.folder, timeout=200)
    assert result.returncode == 0, result.stderr
    return record_of(ps.folder / name)


def record_of(folder: Path) -> Any:
    return json.loads((folder / "study.json").read_text())


def scores_of(record: Any) -> list[Any]:
    return [(one["number"], one["outcome"], one["values"], one["scores"]) for one in record["trials"]]


def ended(folder: Path) -> int:
    file = folder / "study.json"
    return sum(one["outcome"] is not None for one in record_of(folder)["trials"]) if file.exists() else 0


@contextmanager
def searching(ps: Cluster, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a search in the background."""
    typed = command("tune", POINTS, "--home", str(ps.home), *VARY, *words, "--output", name)
    with (ps.folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(typed, cwd=ps.folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finished(ps: Cluster, process: subprocess.Popen[bytes], name: str) -> Any:
    assert process.wait(90) == 0, (ps.folder / f"{name}.out").read_text()
    return record_of(ps.folder / name)


@contextmanager
def nodes(*names: str) -> Iterator[Cluster]:
    with cluster("--patience", "4") as ps:
        for name in names:
            ps.join(name, "--thin")
        ps.wait_for_nodes()
        wait_until(lambda: all(node.state == "present" for node in ps.ask().nodes), "that all nodes are present")
        yield ps


def test_trials_run_in_parallel_and_only_the_best_model_stays() -> None:
    with nodes("ada", "bob") as ps:
        found = tuned(ps, "two", "--thin", "--trials", "12", "--epochs", "2", "--option", "pause=0.005")
        assert [one["outcome"] for one in found["trials"]] == ["complete"] * 12
        worked = {name for one in found["trials"] for name in one["nodes"]}
        assert worked == {"ada", "bob"}, (ps.ask().nodes, ps.said("up.json"))
        left = [path.parent.name for path in (ps.folder / "two").glob("trials/*/model.safetensors")]
        assert left == [f"{found['best']:04d}"]
        assert ps.ask().runs == ()


@pytest.mark.slow
def test_one_node_of_a_master_has_the_same_results_as_two() -> None:
    with nodes("ada", "bob") as ps:
        words = ("--thin", "--trials", "6", "--epochs", "3", "--ahead", "2", "--option", "pause=0.01")
        found = tuned(ps, "two", *words)
        ps.nodes["bob"].kill()
        alone = tuned(ps, "one", *words)
        assert scores_of(alone) == scores_of(found)
        assert alone["best"] == found["best"]


def test_local_nodes_with_a_master_are_rejected(tmp_path: Path) -> None:
    words = ("tune", POINTS, *VARY, "--agreement", "sync", "--local-nodes", "1,1")
    result = evener(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert "--local-nodes" in result.stderr


@pytest.mark.parametrize("words", [("--memory", "1GB"), ("--token", "abc")])
def test_options_that_a_master_would_ignore_are_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    place = ("--home", "home") if words[0] == "--memory" else ()
    result = evener("tune", POINTS, *VARY, *place, *words, cwd=tmp_path)
    assert result.returncode == 2
    assert words[0] in result.stderr


LONG = ("--thin", "--trials", "8", "--epochs", "4", "--ahead", "2", "--option", "pause=0.05", "--seed", "1")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", ["a node", "the master", "the search"])
def test_killed_process_loses_and_repeats_no_trial(dies: str) -> None:
    with nodes("ada", "bob") as ps:
        whole = tuned(ps, "whole", *LONG)
        with searching(ps, "cut", *LONG) as process:
            wait_until(lambda: ended(ps.folder / "cut") >= 2, "that two trials end")
            if dies == "a node":
                ps.nodes["ada"].kill()
            elif dies == "the master":
                ps.master.send_signal(signal.SIGKILL)
                ps.master.wait()
                ps.up()
            else:
                process.kill()
                process.wait()
            if dies != "the search":
                found = finished(ps, process, "cut")
        if dies == "the search":
            with searching(ps, "cut", *LONG, "--resume") as process:
                found = finished(ps, process, "cut")
        assert scores_of(found) == scores_of(whole)
        assert all(one["outcome"] in ("complete", "pruned") for one in found["trials"])
        assert all(sorted(map(int, one["scores"])) == list(range(1, len(one["scores"]) + 1)) for one in found["trials"])
        assert ps.ask().runs == ()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pytorch_trials_have_equal_scores_if_one_of_two_nodes_dies() -> None:
    words = ("--trials", "6", "--epochs", "4", "--ahead", "2", "--option", "pause=0.05")
    with cluster("--patience", "4") as ps:
        ps.join("ada", "--speed", "0.5")  # so that the other one has work, whatever measuring them finds
        ps.join("bob")
        ps.wait_for_nodes()
        with searching(ps, "two", *words) as process:
            wait_until(lambda: ended(ps.folder / "two") >= 3, "that three trials end")
            ps.nodes["bob"].kill()
            found = finished(ps, process, "two")
        alone = tuned(ps, "one", *words)
        assert {name for one in found["trials"] for name in one["nodes"]} == {"ada", "bob"}
        assert {name for one in alone["trials"] for name in one["nodes"]} == {"ada"}
        assert scores_of(alone) == scores_of(found)
        assert alone["best"] == found["best"]
        assert ps.ask().runs == ()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nfnn_search_runs_on_small_nodes_without_pytorch(tmp_path: Path) -> None:
    for name, count in (("train", 2000), ("t10k", 500)):
        write_digits(tmp_path, name, count)
    with cluster() as ps:
        for name in ("ada", "bob"):
            ps.join(name, "--data", str(tmp_path), has_torch=False, memory_bytes=10**9, core=0)
        ps.wait_for_nodes()
        words = ("--data", str(tmp_path), "--thin", "--trials", "4", "--epochs", "2", "--vary", "hidden=16,32")
        found = tuned(ps, "found", *words, task="nfnn")
        assert [one["outcome"] for one in found["trials"]] == ["complete"] * 4
        assert {name for one in found["trials"] for name in one["nodes"]} == {"ada", "bob"}


def write_digits(folder: Path, name: str, count: int) -> None:
    """Write random images and labels in MNIST's format."""
    draw = np.random.default_rng(len(name))
    for kind, array in (
        ("images-idx3", draw.integers(0, 256, (count, 28, 28), np.uint8)),
        ("labels-idx1", draw.integers(0, 10, count, np.uint8)),
    ):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        (folder / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
