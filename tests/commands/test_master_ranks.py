"""`up`, `join`, `train` without an agreement: ranks on the nodes of a master, some of which go and come meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from evener.records.plan import Plan
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import TINY
from support.idle_task import IDLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE = 6.0
WORDS = (TINY, "--precision", "fp64", "--option", "samples=200", "--option", "schedule=true")


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with cluster("--patience", str(PATIENCE)) as one:
        for name in ("one", "two"):
            one.join(name)
        one.wait_for_nodes()
        yield one
        one.down()


def begin(ps: Cluster, epochs: int, *more: str) -> subprocess.Popen[bytes]:
    """A run that has made some steps, of data parallelism if `more` does not name another strategy."""
    more = more if "--strategy" in more else ("--strategy", "data", "--shares", "2,1", *more)
    words = (*WORDS, "--epochs", str(epochs), "--option", "pause=0.03", *more)
    training = ps.start_training(*words, "--output", "struck")
    wait_until(lambda: ps.version() > 20 or training.poll() is not None, "that steps are made")
    return training


def process_on(ps: Cluster, name: str) -> int:
    """Of the rank there."""
    servers = [one for one in psutil.Process(ps.nodes[name].pid).children() if "forkserver" in " ".join(one.cmdline())]
    return int(next(rank.pid for server in servers for rank in server.children()))


def record_of(ps: Cluster, training: subprocess.Popen[bytes], epochs: int, *, resumed: bool = False) -> TrainRecord:
    """Of a run that is complete, and has trained what one process trains; from a checkpoint on, if it was `resumed`."""
    assert training.wait(120) == 0, ps.said("train") + (ps.folder / "train.out").read_text()[-2500:]
    alone = ps.evener("train", *WORDS, "--epochs", str(epochs), "--local-nodes", "1", "--output", "alone", timeout=120)
    assert alone.returncode == 0, alone.stderr
    assert off(ps.folder / "alone", ps.folder / "struck") < 1e-10
    record = read_noun(ps.folder / "struck" / "record.json", TrainRecord)
    counted = sum(step.samples for step in record.steps)
    assert 0 < counted < epochs * 200 if resumed else counted == epochs * 200
    return record


def num_blobs(ps: Cluster) -> int:
    """That are whole, at the master."""
    return sum(path.is_file() for path in (ps.home / "blobs").iterdir())


def off(one: Path, other: Path) -> float:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def test_lost_process_and_replaced_node_lose_no_step(ps: Cluster) -> None:
    training = begin(ps, 40)
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    ps.join("three")
    wait_until(lambda: "three came" in (ps.folder / "train.out").read_text(), "that the new node takes part")
    ps.nodes.pop("one").kill()
    record = record_of(ps, training, 40)
    told = [event.message for event in record.events if event.kind in ("node lost", "joined")]
    assert told[0].startswith("one was killed by signal 9 (SIGKILL); 1 node of 2 goes on with step ")
    assert told[1].startswith("one came; 2 nodes of 2 go on")
    assert told[2].startswith("three came; 3 nodes of 3 go on")
    assert told[3].startswith("one closed its connection to the master, and has not reconnected; 2 nodes of 3 go on")
    assert [node.name for node in record.nodes] == ["one", "two", "three"]
    assert record.nodes[2].share > 0


@pytest.mark.parametrize(
    "words", [("data+sharded", "--replicas", "2,1"), ("pipeline", "--micro-batches", "1")], ids=lambda words: words[0]
)
def test_sharded_run_survives_a_lost_process_and_a_replaced_node(ps: Cluster, words: tuple[str, ...]) -> None:
    ps.join("three")
    ps.wait_for_nodes()
    training = begin(ps, 80, "--strategy", *words)
    shown = ps.folder / "train.out"
    os.kill(process_on(ps, "one"), signal.SIGKILL)
    wait_until(lambda: "one came; 3 nodes" in shown.read_text(), "that the process is replaced")
    ps.join("four")
    told = "node four cannot take part: the model is divided among 3 nodes, and as many are there"
    wait_until(lambda: told in shown.read_text(), "that a newcomer is declined")
    ps.nodes.pop("three").kill()
    wait_until(lambda: "four came; 3 nodes of 4" in shown.read_text(), "that the newcomer has its place")
    record = record_of(ps, training, 80)
    messages = [event.message for event in record.events if event.kind in ("node lost", "joined")]
    whos = ["one was killed", "one came", "three closed its connection", "four came"]
    assert all(message.startswith(who) for message, who in zip(messages, whos, strict=True)), messages
    assert {node.name for node in record.nodes[:3]} == {"one", "two", "three"}
    assert record.nodes[3].name == "four"
    assert record.plan.assignments[3].reason == "came in the place of three"
    assert all(node.share > 0 for node in record.nodes)
    plan = read_noun(ps.folder / "struck" / "plan.json", Plan)
    assert plan.strategy == words[0]
    assert (plan.copy_steps > 0) == (words[0] == "pipeline")


@pytest.mark.parametrize(
    "words", [("data", "--shares", "2,1"), ("pipeline", "--micro-batches", "1")], ids=lambda words: words[0]
)
def test_run_resumes_after_losing_all_nodes_and_the_master(ps: Cluster, words: tuple[str, ...]) -> None:
    training = begin(ps, 60, "--strategy", *words)
    shown = ps.folder / "train.out"
    wait_until(lambda: num_blobs(ps) == 2, "that a checkpoint comes beside the code")
    for name in ("one", "two"):
        ps.nodes.pop(name).kill()
    ps.master.kill()
    ps.up()
    wait_until(lambda: "begins again: from the checkpoint of step " in shown.read_text(), "that nobody is left")
    for name in ("one", "two"):
        ps.join(name)
    record = record_of(ps, training, 60, resumed=True)
    assert [event.kind for event in record.events][:1] == ["resumed"]
    assert num_blobs(ps) == 1


@pytest.mark.parametrize(
    "words", [("spatial", "--columns", "2"), ("pipeline+filter", "--micro-batches", "1")], ids=lambda words: words[0]
)
def test_non_elastic_strategy_resumes_from_the_checkpoint(ps: Cluster, words: tuple[str, ...]) -> None:
    for name in ("three", "four") if words[0] == "pipeline+filter" else ():
        ps.join(name)
    ps.wait_for_nodes()
    training = begin(ps, 60, "--strategy", *words)
    shown = ps.folder / "train.out"
    wait_until(lambda: num_blobs(ps) == 2, "that a checkpoint comes beside the code")
    ps.nodes.pop("two").kill()
    wait_until(lambda: "begins again: from the checkpoint of step " in shown.read_text(), "that all begin again")
    ps.join("two")
    record = record_of(ps, training, 60, resumed=True)
    assert record.plan.strategy == words[0]
    assert [event.kind for event in record.events][:1] == ["resumed"]


def test_run_stopped_without_nodes_returns_its_checkpoint(ps: Cluster) -> None:
    training = begin(ps, 60)
    wait_until(lambda: num_blobs(ps) == 2, "that a checkpoint comes beside the code")
    for name in ("one", "two"):
        ps.nodes.pop(name).kill()
    wait_until(lambda: "begins again" in (ps.folder / "train.out").read_text(), "that nobody is left")
    assert ps.evener("stop", "--home", str(ps.home)).returncode == 0
    assert training.wait(60) == 130
    assert "the weights after step" in ps.said("train")
    assert "0.weight" in load_file(ps.folder / "struck" / "model.safetensors")


def test_node_that_would_slow_down_training_is_rejected(ps: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (ps.folder / "idle.py").write_text(IDLE)
    training = ps.start_training("idle.py", "--strategy", "data", "--no-check", "--output", "struck")
    wait_until(lambda: ps.version() > 20 or training.poll() is not None, "that steps are made")
    monkeypatch.setenv("PAUSE", "1.0")
    ps.join("slow")
    wait_until(lambda: "left out" in (ps.folder / "train.out").read_text(), "that the new node is not taken")
    said = " ".join((ps.folder / "train.out").read_text().split())
    assert "node slow cannot take part: a step would not be shorter: " in said
    assert "slow came" not in said
    assert ps.evener("stop", "--home", str(ps.home)).returncode == 0
    assert training.wait(60) == 130


def test_frozen_rank_is_dropped_and_changes_nothing_after_waking(ps: Cluster) -> None:
    training = begin(ps, 20)
    frozen = process_on(ps, "two")
    os.kill(frozen, signal.SIGSTOP)
    wait_until(lambda: "node lost" in (ps.folder / "train.out").read_text(), "that it is given up")
    with suppress(ProcessLookupError):  # its node may have ended it by now
        os.kill(frozen, signal.SIGCONT)
    record = record_of(ps, training, 20)
    lost = next(event for event in record.events if event.kind == "node lost")
    assert lost.message.startswith("two has been silent for 6 s, at step ")


def test_stopped_run_returns_its_current_weights(ps: Cluster) -> None:
    training = begin(ps, 40)
    stopped = ps.evener("stop", "--home", str(ps.home))
    assert stopped.returncode == 0, stopped.stderr
    assert training.wait(60) == 130
    assert "stopped as asked" in ps.said("train")
    assert (ps.folder / "struck" / "model.safetensors").exists()
    record = read_noun(ps.folder / "struck" / "record.json", TrainRecord)
    assert record.ending == "stopped as asked"
    assert record.steps
    assert wait_until(lambda: ps.ask().run is None, "that the master is free")


def test_node_may_reject_user_code_and_thin_nodes_have_no_ranks(ps: Cluster) -> None:
    ps.join("thin", "--thin")
    ps.join("careful", "--built-in-only")
    ps.wait_for_nodes()
    training = ps.start_training(*WORDS, "--epochs", "2", "--output", "struck")
    record = record_of(ps, training, 2)
    assert {node.name for node in record.nodes} <= {"one", "two"}
    said = (ps.folder / "train.out").read_text()
    assert "its ranks need PyTorch" in said
    assert "(--built-in-only)" in said


def test_error_of_the_task_is_reported_to_the_command(ps: Cluster) -> None:
    (ps.folder / "broken.py").write_text("def task():\n    raise ValueError('no such data')\n")
    training = ps.start_training("broken.py", "--output", "struck")
    assert training.wait(60) not in (0, 1)
    assert " broken.py line 2: ValueError: no such data" in ps.said("train")
    assert "Traceback" not in ps.said("train")


def await_beyond(ps: Cluster, step: int) -> None:
    wait_until(lambda: ps.version() > step, "that the run goes on")


def test_run_survives_five_kills_of_the_master(ps: Cluster) -> None:
    training = begin(ps, 60)
    for _ in range(5):
        step = ps.version()
        ps.master.kill()
        ps.master.wait()
        ps.up("--patience", str(PATIENCE))
        await_beyond(ps, step)
    record = record_of(ps, training, 60)
    assert [event.kind for event in record.events if event.kind == "node lost"] == []
    assert "continuing run" in ps.said("up")


def test_node_killed_before_the_first_step_rejoins(ps: Cluster) -> None:
    words = (*WORDS, "--epochs", "10", "--strategy", "data", "--shares", "2,1", "--option", "pause=0.03")
    training = ps.start_training(*words, "--output", "struck")
    wait_until(lambda: "measuring" in (ps.folder / "train.out").read_text(), "that the nodes are measured")
    ps.nodes["two"].kill()
    ps.nodes["two"].wait()
    ps.join("two")
    record = record_of(ps, training, 10)
    assert [node.name for node in record.nodes] == ["one", "two"]
    assert all(node.share > 0 for node in record.nodes)


def test_node_killed_during_profiling_rejoins_from_a_checkpoint(ps: Cluster) -> None:
    words = (*WORDS, "--epochs", "60", "--strategy", "data", "--shares", "equal", "--option", "pause=0.03")
    training = ps.start_training(*words, "--output", "struck")
    wait_until(lambda: "profiling" in (ps.folder / "train.out").read_text(), "that the nodes rehearse")
    ps.nodes["two"].kill()
    ps.nodes["two"].wait()
    wait_until(lambda: ps.version() > 3 or training.poll() is not None, "that the other makes steps")
    ps.join("two")
    record = record_of(ps, training, 60, resumed=True)
    assert [node.name for node in record.nodes] == ["one", "two"]
    assert all(node.share > 0 for node in record.nodes)


def test_node_joins_a_one_node_run_from_a_checkpoint(ps: Cluster) -> None:
    ps.nodes.pop("two").kill()
    wait_until(lambda: ps.state("two") not in ("present", "away"), "that one node is left")
    training = begin(ps, 60, "--shares", "equal")
    ps.join("two")
    record = record_of(ps, training, 60, resumed=True)
    assert "resumed" in [event.kind for event in record.events]
    assert "begins again: from the checkpoint of step " in (ps.folder / "train.out").read_text()
    assert [node.name for node in record.nodes] == ["one", "two"]
