"""Ranks on hosts of their own: a link that is cut and joined again, and a node that comes over a line of 1 Gbit/s."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener.ps.master.ranks.rank_table import LINE_RETRY_S
from evener.records.event_tail import EVENTS_FILE, EventTail
from evener.records.record import Event, Step, TrainRecord
from evener.records.schema import read_noun
from hosts import Hosts, Process, fixture
from hosts.fixture import Build
from hosts.machines import Host
from support.commands import TINY, evener

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
EVENER = [sys.executable, "-m", "evener"]
PATIENCE, BATCH = 6.0, 10
PLACE = {**dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
LARGE = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

class Slow(nn.Linear):
    pause = 0.0

    def forward(self, x):
        time.sleep(self.pause * len(x))
        return super().forward(x)

def task(pause: float = 0.0):
    Slow.pause = pause
    draw = torch.Generator().manual_seed(0)
    return Task(
        name="large",
        model=lambda: Slow(5000, 5000, bias=False),
        loss=nn.functional.mse_loss,
        train_data=lambda: TensorDataset(torch.randn(480, 5000, generator=draw), torch.zeros(480, 5000)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=12,
        epochs=1,
    )
"""
"""100 MB of weights; `pause` is the seconds that a sample takes besides, without a core."""
RING_SECONDS = 2 * 2 / 3 * 100e6 * 8 / 1e9
"""That the sum of 100 MB of gradients takes three nodes at 1 Gbit/s: each sends two thirds of it twice."""


class Site:
    """A master and nodes on hosts of their own."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        words = ["up", "--home", str(folder / "home"), "--listen", ":7117", "--json", "--patience", str(PATIENCE)]
        up = hosts["master"].start([*EVENER, *words], environment=PLACE)
        self._token = json.loads(up.wait_for(r"\{.*\}", 90)[0])["token"]

    def join(self, name: str) -> Process:
        words = ["join", f"{self.hosts['master'].address}:7117", "--name", name]
        words += ["--cache", str(self.folder / f"cache-{name}")]
        return self.hosts[name].start([*EVENER, *words], environment={**PLACE, "EVENER_TOKEN": self._token})

    def await_nodes(self, *names: str) -> None:
        wait_for(lambda: all(re.search(rf"\b{name} .*present", nodes) for nodes in [self._nodes()] for name in names))

    def _nodes(self) -> str:
        words = ["nodes", "--home", str(self.folder / "home")]
        asked = self.hosts["master"].start([*EVENER, *words], environment=PLACE)
        assert asked.wait(60) == 0, asked.transcript()
        return asked.text

    def train(self, *words: str) -> Process:
        options = ["--home", str(self.folder / "home"), "--output", str(self.folder / "run"), "--no-preflight"]
        return self.hosts["master"].start([*EVENER, "train", *words, *options], cwd=self.folder, environment=PLACE)

    def stopped(self, training: Process) -> tuple[list[Step], list[Event]]:
        """Stop a run; return its steps, some of them summed up, and its other events."""
        stop = self.hosts["master"].start([*EVENER, "stop", "--home", str(self.folder / "home")], environment=PLACE)
        assert stop.wait(60) == 0, stop.transcript()
        assert training.wait(90) == 130, training.transcript()
        moments = EventTail(self.folder / "run" / EVENTS_FILE).read()
        events = [event for moment in moments for event in moment.events]
        return [one for one in events if isinstance(one, Step)], [one for one in events if isinstance(one, Event)]

    def record(self) -> TrainRecord:
        return read_noun(self.folder / "run" / "record.json", TrainRecord)


@contextmanager
def site(build_hosts: Build, folder: Path, *names: str, mbit: float | None = None) -> Iterator[Site]:
    with build_hosts(*(Host(name=name, mbit=mbit) for name in ("master", *names))) as hosts:
        yield Site(hosts, folder)


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "what was awaited did not happen"
        time.sleep(0.3)


def test_node_rejoins_after_its_link_was_cut(build_hosts: Build, tmp_path: Path) -> None:
    words = [TINY, "--precision", "fp64", "--option", "samples=200", "--option", "schedule=true", "--epochs", "50"]
    with site(build_hosts, tmp_path, "one", "two") as place:
        for name in ("one", "two"):
            place.join(name)
        place.await_nodes("one", "two")
        training = place.train(*words, "--option", "pause=0.03", "--strategy", "data", "--shares", "2,1")
        training.wait_for("epoch 2 ", 90)
        place.hosts["one"].cut()
        training.wait_for("node lost: one has been silent for 6 s", 60)
        place.hosts["one"].join()
        training.wait_for("joined: one came; 2 nodes of 2 go on", 90)
        assert training.wait(120) == 0, training.transcript()
        assert sum(step.samples for step in place.record().steps) == 50 * 200
    alone = evener("train", *words, "--local-nodes", "1", "--output", "alone", cwd=tmp_path, timeout=120)
    assert alone.returncode == 0, alone.stderr
    first, second = load_file(tmp_path / "alone/model.safetensors"), load_file(tmp_path / "run/model.safetensors")
    assert max(float((first[name].double() - second[name].double()).abs().max()) for name in first) < 1e-10


ENDLESS = (TINY, "--option", "samples=200", "--option", "pause=0.03", "--epochs", "5000", "--strategy", "data")


def test_node_with_one_cut_link_is_left_out_until_it_works(build_hosts: Build, tmp_path: Path) -> None:
    names = ("one", "two", "three")
    with site(build_hosts, tmp_path, *names) as place:
        for name in names:
            place.join(name)
        place.await_nodes(*names)
        training = place.train(*ENDLESS, "--shares", "1,1,1")
        training.wait_for("epoch 2 ", 90)
        place.hosts["two"].cut_from(place.hosts["three"])
        left = training.wait_for("left out: node (three|two) cannot take part", 2 * PATIENCE + 6)[1]
        place.hosts["two"].join_with(place.hosts["three"])
        training.wait_for(f"joined: {left} came", LINE_RETRY_S + 60)
        steps, events = place.stopped(training)
    assert {event.nodes for event in events if event.kind == "node lost"} == {(left,)}
    assert abs(sum(step.samples for step in steps) - BATCH * steps[-1].step) <= BATCH  # the last step may be cut short


def test_joining_node_that_cannot_reach_another_delays_no_step(build_hosts: Build, tmp_path: Path) -> None:
    names = ("one", "two", "three")
    with site(build_hosts, tmp_path, *names) as place:
        for name in names[:2]:
            place.join(name)
        place.await_nodes(*names[:2])
        training = place.train(*ENDLESS, "--shares", "1,1")
        training.wait_for("epoch 2 ", 90)
        place.hosts["two"].cut_from(place.hosts["three"])
        node = place.join("three")
        training.wait_for("left out: node three cannot take part: node three does not reach node two", 90)
        node.wait_for("(?s)starting process 3 .*starting process 4 .*starting process 5 ", 2 * LINE_RETRY_S + 90)
        place.hosts["two"].join_with(place.hosts["three"])
        training.wait_for("joined: three came", LINE_RETRY_S + 60)
        steps, events = place.stopped(training)
    kinds = Counter(event.kind for event in events)
    assert (kinds["left out"], kinds["node lost"]) == (1, 0)
    assert max(step.seconds for step in steps) < PATIENCE / 2  # of a few steps together


@pytest.mark.parametrize("pause", [0.0, 0.25])
def test_node_joins_a_100_mb_run_over_one_gigabit(
    build_hosts: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], pause: float
) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    words = ("--strategy", "data", "--shares", "1,1", "--no-check")
    with site(build_hosts, tmp_path, "one", "two", "three", mbit=1000) as place:
        for name in ("one", "two"):
            place.join(name)
        place.await_nodes("one", "two")
        training = place.train("large.py", *words, "--option", f"pause={pause}")
        training.wait_for("step [0-9]", 180)
        place.join("three")
        assert training.wait(300) == 0, training.transcript()
    record = place.record()
    came = next(event.step for event in record.events if event.kind == "joined")
    whole = next((event.step for event in record.events if event.kind == "caught up"), came)
    seconds = statistics.median(step.seconds for step in record.steps if step.step <= came)
    usual = statistics.median(step.seconds for step in record.steps if step.step > whole + 3)
    waited = (1 - record.goodput) * record.seconds
    slowed = [step.seconds - max(seconds, usual) for step in record.steps if came < step.step <= whole]
    with capsys.disabled():
        sys.stdout.write(
            f"\nthree came after step {came}: the others waited for {waited:.2f} s, and steps up to {whole} took "
            f"{sum(slowed):.2f} s longer; a step took {seconds:.2f} s before, {usual:.2f} s after; the pauses of four "
            f"samples and the sum of gradients take {4 * pause + RING_SECONDS:.2f} s\n"
        )
    assert waited + sum(slowed) < 5 * seconds
