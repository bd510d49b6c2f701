"""Master and nodes on hosts of their own, commands as typed: a line that becomes thin, an address that changes."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from hosts import Host, Hosts, Process, fixture
from hosts.fixture import Build
from hosts.network import run
from support.idle_task import SAMPLES, write_pausing_task

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
EVENER = [sys.executable, "-m", "evener"]
PORT = 7117
OTHER_ADDRESS = "10.73.0.99"
PATIENCE = 5.0
ONE_THREAD = {**dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), "COLUMNS": "160"}


@contextmanager
def cluster(build_hosts: Build, folder: Path, *nodes: str) -> Iterator[Hosts]:
    """A master that listens at all its addresses, and nodes that know two of them."""
    with build_hosts(Host(name="master"), *(Host(name=name) for name in nodes)) as hosts:
        words = ["up", "--home", str(folder / "home"), "--listen", f":{PORT}", "--json", "--patience", str(PATIENCE)]
        up = hosts["master"].start([*EVENER, *words], environment=ONE_THREAD)
        token = json.loads(up.wait_for(r"\{.*\}", 60)[0])["token"]
        addresses = f"{hosts['master'].address}:{PORT},{OTHER_ADDRESS}:{PORT}"
        for name in nodes:
            words = ["join", addresses, "--thin", "--name", name, "--cache", str(folder / f"cache-{name}")]
            hosts[name].start([*EVENER, *words], environment={**ONE_THREAD, "EVENER_TOKEN": token})
        yield hosts


def train(hosts: Hosts, folder: Path, output: str, *words: str, agreement: str = "sync") -> Process:
    """`evener train` on the master's host, once all nodes are there."""
    wait_for(lambda: all(re.search(rf"{name} .*present", nodes(hosts, folder)) for name in hosts if name != "master"))
    options = ["--agreement", agreement, "--home", str(folder / "home"), "--output", str(folder / output), *words]
    return hosts["master"].start([*EVENER, "train", write_pausing_task(folder), *options], environment=ONE_THREAD)


def nodes(hosts: Hosts, folder: Path) -> str:
    """What `evener nodes` says on the master's host."""
    asked = hosts["master"].start([*EVENER, "nodes", "--home", str(folder / "home")], environment=ONE_THREAD)
    assert asked.wait(60) == 0, asked.transcript()
    return asked.text


def updates(hosts: Hosts, folder: Path) -> int:
    """Of the run in progress."""
    found = re.search(r"(\d+) updates", nodes(hosts, folder))
    return int(found[1]) if found else 0


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "what was awaited did not happen"
        time.sleep(0.3)


def record_of(folder: Path, epochs: int) -> TrainRecord:
    """Of a run, in which every sample counted once."""
    record = read_noun(folder / "record.json", TrainRecord)
    assert sum(step.samples for step in record.steps) == epochs * SAMPLES
    return record


def test_nodes_and_commands_find_a_new_address_of_the_master(build_hosts: Build, tmp_path: Path) -> None:
    with cluster(build_hosts, tmp_path, "a", "b") as hosts:
        training = train(hosts, tmp_path, "out", "--epochs", "25", "--option", "pause=0.05")
        wait_for(lambda: updates(hosts, tmp_path) > 5)
        inside = hosts["master"].link.namespace.name
        run("ip", "-n", inside, "addr", "del", f"{hosts['master'].address}/24", "dev", "eth0")
        run("ip", "-n", inside, "addr", "add", f"{OTHER_ADDRESS}/24", "dev", "eth0")
        before = updates(hosts, tmp_path)
        wait_for(lambda: updates(hosts, tmp_path) > before + 20)
        assert training.wait(200) == 0, training.transcript()
    assert {node.name for node in record_of(tmp_path / "out", 25).nodes} == {"a", "b"}


def test_slow_link_does_not_block_the_other_nodes(build_hosts: Build, tmp_path: Path) -> None:
    epochs, wide = 12, "width=100000"  # 4.4 MB: 35 s each way at 1 Mbit/s
    with cluster(build_hosts, tmp_path, "a", "b", "thin") as hosts:
        training = train(hosts, tmp_path, "out", "--epochs", str(epochs), "--option", wide, "--option", "pause=0.02")
        wait_for(lambda: updates(hosts, tmp_path) > 5)
        hosts["thin"].limit(1)
        assert training.wait(300) == 0, training.transcript()
    record = record_of(tmp_path / "out", epochs)
    assert max(step.seconds for step in record.steps) < 30  # it took more than a minute, or for ever
    told = [event for event in record.events if event.kind == "slow link"]
    assert told
    assert {event.nodes for event in told} == {("thin",)}
    assert "--local-steps, or --compress, to send less" in told[0].message
    assert not [event for event in record.events if event.kind == "excluded" and "thin" not in event.nodes]


def test_node_with_a_slow_link_compresses_and_stays(build_hosts: Build, tmp_path: Path) -> None:
    epochs, wide = (
        12,
        "width=10000",
    )  # 440 kB: 3.5 s at 1 Mbit/s, three times a round, and a quarter of that, twice, in int8
    with cluster(build_hosts, tmp_path, "a", "b", "thin") as hosts:
        words = ["--epochs", str(epochs), "--local-steps", "5", "--option", wide, "--option", "pause=0.1"]
        training = train(hosts, tmp_path, "out", *words, agreement="average")
        wait_for(lambda: updates(hosts, tmp_path) > 2)
        hosts["thin"].limit(1)
        assert training.wait(200) == 0, training.transcript()
    record = record_of(tmp_path / "out", epochs)
    (told,) = [event for event in record.events if event.kind == "slow link"]
    assert told.nodes == ("thin",)
    assert "it sends int8 from now on" in told.message
    assert told.step < len(record.steps) - 4
    assert not [event for event in record.events if event.kind in ("excluded", "away", "refused")]
    assert min(node.share for node in record.nodes) > 0.2  # of three equal ones
    assert record.bytes_saved > 0
    after = [step.seconds for step in record.steps if step.step > told.step + 2]
    assert max(after) < PATIENCE  # two of the ten seconds that it took
