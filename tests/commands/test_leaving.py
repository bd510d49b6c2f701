"""Nodes that leave on notice: a signal, `evener leave`, `evener nodes --release`; no step is lost or done again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import TINY
from support.idle_task import IDLE, SAMPLES, write_pausing_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EPOCHS = 20
WORDS = (TINY, "--precision", "fp64", "--option", "samples=200", "--option", "schedule=true", "--epochs", str(EPOCHS))


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with cluster("--patience", "6") as one:
        yield one
        one.down()


def join(ps: Cluster, *names: str, words: tuple[str, ...] = ()) -> None:
    for name in names:
        ps.join(name, *words)
    ps.wait_for_nodes()


def by_signal(ps: Cluster, name: str) -> int:
    """Exit code of a node that gets a SIGTERM."""
    ps.nodes[name].send_signal(signal.SIGTERM)
    return ps.nodes.pop(name).wait(30)


def by_signal_to_all(ps: Cluster, name: str) -> int:
    """The same if its rank gets the signal, too, as from Slurm."""
    node = psutil.Process(ps.nodes[name].pid)
    for one in (node, *node.children(recursive=True)):
        one.send_signal(signal.SIGTERM)
    return ps.nodes.pop(name).wait(30)


def by_command(ps: Cluster, name: str) -> int:
    """Exit code of a node that `evener leave` asks."""
    left = ps.evener("leave", "--cache", str(ps.folder / f"cache-{name}"))
    assert (left.returncode, f"node {name} has left" in left.stderr) == (0, True), left.stderr
    return ps.nodes.pop(name).wait(30)


def by_admin(ps: Cluster, name: str) -> int:
    """Exit code of a node that an admin releases."""
    assert ps.evener("nodes", "--release", name, "--home", str(ps.home)).returncode == 0
    return ps.nodes.pop(name).wait(30)


WAYS: list[tuple[Callable[[Cluster, str], int], int]] = [
    (by_signal, 130), (by_signal_to_all, 130), (by_command, 0), (by_admin, 0)
]  # fmt: skip


def off(one: Path, other: Path) -> float:
    """Largest difference of two runs' weights."""
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def begin(ps: Cluster, *words: str, updates: int = 20) -> Callable[..., TrainRecord]:
    """Begin a run; return a function that returns its record."""
    training = ps.start_training(*words, "--output", "run")
    wait_until(lambda: ps.version() > updates or training.poll() is not None, "that steps are made")

    def record(code: int = 0) -> TrainRecord:
        assert training.wait(150) == code, ps.said("train") + (ps.folder / "train.out").read_text()[-2500:]
        return read_noun(ps.folder / "run" / "record.json", TrainRecord)

    return record


def check_ranks(ps: Cluster, record: TrainRecord, kinds: list[str]) -> None:
    """Every step was made once, the weights are those of one process, and events of nodes have these `kinds`."""
    alone = ps.evener("train", *WORDS, "--local-nodes", "1", "--output", "alone", timeout=120)
    assert alone.returncode == 0, alone.stderr
    assert off(ps.folder / "alone", ps.folder / "run") < 1e-10
    assert sum(step.samples for step in record.steps) == EPOCHS * 200
    assert [event.kind for event in record.events if event.nodes] == kinds, record.events
    assert not any("done again" in event.message for event in record.events)


@pytest.mark.parametrize(("leave", "code"), WAYS, ids=lambda way: getattr(way, "__name__", ""))
def test_rank_leaves_after_its_step_and_comes_back(
    ps: Cluster, leave: Callable[[Cluster, str], int], code: int
) -> None:
    join(ps, "one", "two")
    record = begin(ps, *WORDS, "--option", "pause=0.03", "--strategy", "data", "--shares", "2,1")
    assert leave(ps, "one") == code
    shown = ps.folder / "train.out"
    wait_until(lambda: "one left on notice; 1 node of 2 goes on" in shown.read_text(), "that the other goes on")
    assert ps.state("one") == "left"
    join(ps, "one")
    wait_until(lambda: "one came; 2 nodes of 2 go on" in shown.read_text(), "that it is back")
    check_ranks(ps, record(), ["left", "joined", "caught up"])


@pytest.mark.parametrize("words", [("pipeline", "--micro-batches", "1"), ("sharded",)], ids=lambda words: words[0])
def test_rank_leaves_with_its_part_of_the_model(ps: Cluster, words: tuple[str, ...]) -> None:
    join(ps, "one", "two", "three")
    record = begin(ps, *WORDS, "--option", "pause=0.03", "--strategy", *words)
    assert by_signal(ps, "one") == 130
    wait_until(lambda: "one left on notice; 2 nodes" in (ps.folder / "train.out").read_text(), "that the others go on")
    check_ranks(ps, record(), ["left"])


def test_two_ranks_leave_one_after_the_other(ps: Cluster) -> None:
    join(ps, "one", "two", "three")
    record = begin(ps, *WORDS, "--option", "pause=0.03", "--strategy", "pipeline", "--micro-batches", "1")
    for name in ("three", "one"):
        ps.nodes[name].send_signal(signal.SIGTERM)
    assert [ps.nodes.pop(name).wait(40) for name in ("three", "one")] == [130, 130]
    check_ranks(ps, record(), ["left", "left"])


def test_last_rank_goes_when_its_time_is_over_and_the_run_continues_elsewhere(ps: Cluster) -> None:
    join(ps, "one", words=("--grace", "1"))
    training = begin(ps, *WORDS, "--option", "pause=0.03")
    ps.nodes["one"].send_signal(signal.SIGTERM)
    assert ps.nodes.pop("one").wait(20) == 130
    join(ps, "two")
    assert training().validations[-1].epoch == EPOCHS - 1


@pytest.mark.parametrize(("leave", "code"), WAYS, ids=lambda way: getattr(way, "__name__", ""))
@pytest.mark.parametrize("agreement", ["sync", "async", "diloco"])
def test_worker_finishes_its_lease_and_leaves(
    ps: Cluster, tmp_path: Path, agreement: str, leave: Callable[[Cluster, str], int], code: int
) -> None:
    join(ps, "one", "two", words=("--thin",))
    words = ("--agreement", agreement, "--option", "pause=0.05", "--epochs", "60")
    steps = ("--local-steps", "4") if agreement == "diloco" else ()
    record_of = begin(ps, write_pausing_task(tmp_path), *words, *steps, updates=3)
    assert leave(ps, "one") == code
    assert ps.state("one") == "left"
    join(ps, "one", words=("--thin",))
    record = record_of()
    assert sum(step.samples for step in record.steps) == 60 * SAMPLES
    assert [(node.refused, node.late) for node in record.nodes] == [(0, 0), (0, 0)]
    kinds = [event.kind for event in record.events]
    assert "skipped" not in kinds, record.events
    assert kinds.count("left") == 1


def test_release_holds_for_a_restarted_master(ps: Cluster, tmp_path: Path) -> None:
    join(ps, "one", "two", words=("--thin",))
    words = ("--agreement", "average", "--local-steps", "20", "--option", "pause=0.4", "--epochs", "12")
    record_of = begin(ps, write_pausing_task(tmp_path), *words, updates=-1)
    wait_until(lambda: {node.doing for node in ps.ask().nodes} == {"works"}, "that both work")
    assert ps.evener("nodes", "--release", "one", "--grace", "60", "--home", str(ps.home)).returncode == 0
    wait_until(lambda: "finishing the work in progress" in ps.said("one"), "that it gives notice")
    ps.master.kill()
    ps.master.wait()
    ps.up()
    assert ps.nodes.pop("one").wait(60) == 0
    assert ps.state("one") == "left"
    assert sum(step.samples for step in record_of().steps) == 12 * SAMPLES


def test_second_signal_ends_a_node_at_once(ps: Cluster, tmp_path: Path) -> None:
    join(ps, "one", "two", words=("--thin", "--grace", "60"))
    task = write_pausing_task(tmp_path)
    begin(ps, task, "--agreement", "average", "--local-steps", "1000", "--option", "pause=0.5", updates=-1)
    wait_until(lambda: ps.ask().nodes[0].doing == "works", "that it works")
    one = ps.nodes.pop("one")
    one.send_signal(signal.SIGINT)
    wait_until(lambda: "finishing the work in progress, for at most 60 s" in ps.said("one"), "that it gives notice")
    time.sleep(1.1)  # signals that follow sooner belong to the first one
    os.kill(one.pid, signal.SIGINT)
    assert one.wait(10) == 130


def test_leave_names_the_nodes_that_run(ps: Cluster) -> None:
    join(ps, "one")
    cache = str(ps.folder / "cache-one")
    wrong = ps.evener("leave", "--name", "two", "--cache", cache)
    assert (wrong.returncode, "one" in wrong.stderr) == (2, True)
    assert ps.evener("nodes", "--release", "two", "--home", str(ps.home)).returncode == 2
    assert by_command(ps, "one") == 0
    assert ps.evener("leave", "--cache", cache).returncode == 2


def test_last_rank_hands_its_state_to_a_node_that_was_left_out(ps: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (ps.folder / "idle.py").write_text(IDLE)
    join(ps, "one", "two", words=("--grace", "60"))
    record = begin(ps, "idle.py", "--strategy", "data", "--no-check")
    shown = ps.folder / "train.out"
    monkeypatch.setenv("PAUSE", "0.1")
    join(ps, "slow")
    rejection = "node slow cannot take part: a step would not be shorter"
    wait_until(lambda: rejection in " ".join(shown.read_text().split()), "that it stays out")
    for name in ("two", "one"):
        ps.nodes[name].send_signal(signal.SIGTERM)
    assert [ps.nodes.pop(name).wait(60) for name in ("two", "one")] == [130, 130]
    version = ps.version()
    wait_until(lambda: ps.version() > version + 5, "that the other continues")
    assert ps.evener("stop", "--home", str(ps.home)).returncode == 0
    kinds = [event.kind for event in record(130).events if event.nodes]
    assert kinds.count("left") >= 2
    assert not {"node lost", "begins again", "resumed"} & set(kinds)
