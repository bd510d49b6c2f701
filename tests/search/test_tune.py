"""`evener tune`, the real command, mostly with trials that need no PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands import TINY, command, evener, last_json

optuna: Any = pytest.importorskip("optuna", reason="needs the extra tune")

POINTS = str(Path(__file__).parents[1] / "support_tasks" / "points.py")
SLEEPING = Path(__file__).parents[2] / "benchmarks" / "tune_task.py"
VARY = ("--vary", "lr=1e-3..1:log", "--vary", "width=4..12")


def study_of(folder: Path) -> Any:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name="evener", storage=storage)


def record_of(folder: Path) -> Any:
    return json.loads((folder / "study.json").read_text())


def trials_of(folder: Path) -> list[Any]:
    return [(one["number"], one["outcome"], one["values"], one["score"]) for one in record_of(folder)["trials"]]


def test_search_shows_a_table_importances_and_the_best_command(tmp_path: Path) -> None:
    words = ("tune", POINTS, "--thin", "--trials", "12", *VARY, "--local-nodes", "1,0.5", "--output", "found")
    result = evener(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    record = record_of(tmp_path / "found")
    best = record["trials"][record["best"]]
    assert (
        f"evener train {POINTS} --option lr={best['values']['lr']} --option width={best['values']['width']}"
        in result.stdout
    )
    assert "12 trials of" in result.stdout
    assert "importance" in result.stdout
    told = study_of(tmp_path / "found").get_trials()
    assert [trial.state.name for trial in told] == [one["outcome"].upper() for one in record["trials"]]
    assert {"COMPLETE", "PRUNED"} == {trial.state.name for trial in told}
    left = [path.parent.name for path in (tmp_path / "found").glob("trials/*/model.safetensors")]
    assert left == [f"{record['best']:04d}"]  # of the best; losers' checkpoints are gone
    assert not list((tmp_path / "found").glob("trials/*/checkpoints/step-*"))


def test_a_search_without_varied_options_suggests_vary(tmp_path: Path) -> None:
    result = evener("tune", "digits", "--thin", cwd=tmp_path)
    assert result.returncode == 2
    assert (
        "nothing is varied: give --vary lr=1e-4..1e-1:log, or define space(trial) in the task's file" in result.stderr
    )
    assert not list(tmp_path.glob("runs/*"))  # no folder of a search that never began


def test_error_in_user_code_names_file_and_line_and_fails_its_trial(tmp_path: Path) -> None:
    words = ("tune", POINTS, "--thin", "--trials", "6", "--vary", "width=12,13", "--prune", "none", "--epochs", "1")
    result = evener(*words, "--output", "found", "--json", cwd=tmp_path)
    assert last_json(result)["trials"] == 6
    failed = [one for one in record_of(tmp_path / "found")["trials"] if one["outcome"] == "failed"]
    assert failed
    assert all(one["values"]["width"] == "13" for one in failed)
    assert all(f"{POINTS} line 25: ValueError: an unlucky width" in one["reason"] for one in failed)


def test_a_broken_space_is_reported_with_its_line(tmp_path: Path) -> None:
    result = evener("tune", POINTS, "--thin", cwd=tmp_path, EVENER_TEST_SPACE="broken")
    assert result.returncode == 3
    assert f"{POINTS} line 70: KeyError: 'space'" in result.stderr
    assert "Traceback" not in result.stderr


def killed(words: tuple[str, ...], cwd: Path, *, node: bool, after: float) -> None:
    """Start a search and kill -9 it, or one of its nodes, when a trial has ended; then wait for its end."""
    with subprocess.Popen(
        command(*words), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as search:
        assert search.stdout is not None
        next(line for line in search.stdout if line.startswith("trial "))
        time.sleep(after)
        if node:
            while not (workers := _workers(search.pid)):
                assert search.poll() is None, "the search was over before a node could be killed"
            workers[0].kill()
        else:
            os.kill(search.pid, signal.SIGKILL)
        search.stdout.read()
        assert search.wait(60) == (0 if node else -signal.SIGKILL)


def _workers(pid: int) -> list[psutil.Process]:
    """The processes that trials run in: children of the server that forks them."""
    servers = [one for one in psutil.Process(pid).children() if "forkserver" in " ".join(one.cmdline())]
    return [worker for server in servers for worker in server.children() if worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_killed_search_and_a_killed_node_do_not_change_the_results(tmp_path: Path) -> None:
    words: tuple[str, ...] = (
        "tune",
        POINTS,
        "--thin",
        "--trials",
        "10",
        "--vary",
        "lr=1e-3..1:log",
        "--option",
        "pause=0.01",
    )
    words += ("--local-nodes", "1,0.5", "--epochs", "3", "--ahead", "2")
    assert evener(*words, "--output", "whole", cwd=tmp_path).returncode == 0
    killed((*words, "--output", "cut"), tmp_path, node=False, after=0.05)
    refused = evener(*words, "--output", "cut", cwd=tmp_path)
    assert refused.returncode == 2
    assert "holds a study: add --resume to continue it" in refused.stderr
    killed((*words, "--output", "cut", "--resume"), tmp_path, node=True, after=0.02)
    assert trials_of(tmp_path / "cut") == trials_of(tmp_path / "whole")
    assert len(study_of(tmp_path / "cut").get_trials()) == 10


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pytorch_trials_have_equal_scores_on_one_node_and_on_three(tmp_path: Path) -> None:
    words = ("tune", str(SLEEPING), "--trials", "4", "--vary", "lr=1e-3..1:log", "--epochs", "4", "--prune", "none")
    for name, nodes, pause in (("one", "1", "0"), ("three", "1,0.5,0.25", "0.4")):
        result = evener(
            *words, "--option", f"pause={pause}", "--local-nodes", nodes, "--output", name, cwd=tmp_path, timeout=200
        )
        assert result.returncode == 0, result.stderr
    one, three = (record_of(tmp_path / name) for name in ("one", "three"))
    assert any(len(trial["nodes"]) > 1 for trial in three["trials"])
    assert one["best"] == three["best"]
    scores = [[trial["score"] for trial in record["trials"]] for record in (one, three)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_long_trial_of_pytorch_on_one_node_is_not_lost(tmp_path: Path) -> None:
    words = ("tune", TINY, "--vary", "samples=40,50", "--option", "pause=0.3", "--trials", "1", "--epochs", "20")
    told = evener(*words, "--local-nodes", "1", "--prune", "none", "--output", "found", cwd=tmp_path, timeout=180)
    assert told.returncode == 0, told.stderr
    assert "restarts" not in told.stdout + told.stderr
    (one,) = record_of(tmp_path / "found")["trials"]
    assert (one["outcome"], one["attempts"], len(one["scores"])) == ("complete", 0, 20)
    assert one["seconds"] > 31.0  # seconds after which a node that was never heard is lost
