"""Ten faults planted among machines in network namespaces: `evener doctor --master` names each, and its cure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import evener
from evener.records.atomic import atomic_write
from hosts import Host, Hosts, Machine, Process, fixture, network

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]
build_hosts = fixture.build_hosts

MAX_SECONDS = 10.0
OF_THE_MOMENT = {"load", "heat", "memory"}
"""What a machine that others share may truly have."""
EVENER = [sys.executable, "-m", "evener"]
USUAL = {"GLOO_SOCKET_IFNAME": "eth0", "EVENER_TOKEN": ""}
_SYN = ("iptables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-j")
WALL_CLOCK = Path(__file__).parents[1] / "support" / "told_wall_clock.c"
TASK = """
from pathlib import Path
import numpy as np
from evener import ThinTask
from evener import autodiff as ad
import needed_module

def thin_task(data_dir: Path) -> ThinTask:
    with np.load(data_dir / "data.npz") as found:
        x, y = found["x"], found["y"]
    return ThinTask(name="mine", model=lambda: ad.nn.Linear(4, 3), loss=ad.functional.cross_entropy,
                    train_data=lambda: (x, y), optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1))
"""


class Place(NamedTuple):
    """Where a fault is planted.

    Attributes:
        folder: of the test.
        bob: the machine, before its node is started.
        variables: with which its node is started.
        prefix: words before the command of its node.
    """

    folder: Path
    bob: Machine
    variables: dict[str, str]
    prefix: list[str]

    @property
    def data(self) -> Path:
        """What bob's node finds as its data."""
        return self.folder / "data-bob"


def inside(machine: Machine, *words: str) -> None:
    """Run a command in a machine's network."""
    network.run("ip", "netns", "exec", machine.link.namespace.name, *words)


def closed_port(place: Place) -> None:
    inside(place.bob, *_SYN, "REJECT", "--reject-with", "tcp-reset")


def one_way_firewall(place: Place) -> None:
    inside(place.bob, *_SYN, "DROP")


def wrong_interface(place: Place) -> None:
    place.variables["GLOO_SOCKET_IFNAME"] = "lo"


def other_mtu(place: Place) -> None:
    inside(place.bob, *["ip", "link", "set", "dev", "eth0", "mtu", "1000"])


def clock_an_hour_off(place: Place) -> None:
    library, seconds = place.folder / "wall_clock.so", place.folder / "seconds"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, WALL_CLOCK], check=True, timeout=60)
    seconds.write_text("3600")
    place.variables.update(LD_PRELOAD=str(library), TOLD_WALL_CLOCK=str(seconds))


def full_disk(place: Place) -> None:
    mount = 'mount -t tmpfs -o size=4m none "$0"; exec "$@"'
    place.prefix.extend(["unshare", "--mount", "sh", "-ec", mount, str(place.folder / "cache-bob")])


def missing_module(place: Place) -> None:
    place.variables["PYTHONPATH"] = str(Path(evener.__file__).parents[1])


def other_data(place: Place) -> None:
    write_data(place.data, seed=1)


def other_version(place: Place) -> None:
    copied = place.folder / "other" / "evener"
    shutil.copytree(Path(evener.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    version = copied / "records/version.py"
    version.write_text(version.read_text().replace(evener.__version__, "99.1"))
    place.variables["PYTHONPATH"] = f"{copied.parent}{os.pathsep}{place.folder / 'modules'}"


def busy_core(place: Place) -> None:
    place.bob.start([sys.executable, "-c", "while True: pass"])


FAULTS: dict[Callable[[Place], None], tuple[str, list[str]]] = {
    closed_port: ("port", ["ada cannot connect to bob at 10.73.0.3, port ", "(Connection refused)", "firewall of bob"]),
    one_way_firewall: ("port", ["ada cannot connect to bob at 10.73.0.3, port ", "(no answer)", "firewall of bob"]),
    wrong_interface: ("interface", ["bob: Gloo will take the loopback", "set GLOO_SOCKET_IFNAME=eth0"]),
    other_mtu: ("MTU", ["bob: eth0 sends packets of 1000 bytes, eth0 of master of 9000", "set dev eth0 mtu 9000"]),
    clock_an_hour_off: ("clock", ["bob: its clock is 3600 s ahead of that of master", "let both follow NTP"]),
    full_disk: ("disk", ["bob: ", "cache-bob (cache) has 4 MB free", "remove files there"]),
    missing_module: (
        "task",
        ["bob: ", "my_task.py line 6: ModuleNotFoundError: No module named 'needed_module'", "install"],
    ),
    other_data: ("data", ["bob: its training data are not those of ada: other samples", "give both the same files"]),
    other_version: ("versions", ["bob: it runs Evener 99.1, master ", "install the same version on both"]),
    busy_core: ("load", ["bob: others keep ", "cores busy", "python", "(pid ", "end them"]),
}
"""What is planted -> what is looked at, and words of the sentence and its cure."""


class Commands(NamedTuple):
    """What is typed at the master's machine, by somebody who has its address and token."""

    hub: Machine
    folder: Path
    access: list[str]
    variables: dict[str, str]

    def doctor(self) -> tuple[int, float, list[dict[str, str]]]:
        """Exit code, seconds, and what was found."""
        began = time.monotonic()
        asked = self.start("doctor", "--task", "my_task.py", "--json")
        code = asked.wait(60)
        assert "findings" in asked.text, asked.transcript()
        return code, time.monotonic() - began, json.loads(asked.text)["findings"]

    def start(self, *words: str) -> Process:
        return self.hub.start([*EVENER, *words, *self.access], cwd=self.folder, environment=self.variables)


def write_data(folder: Path, seed: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {"x": draw.standard_normal((40, 4)).astype(np.float32), "y": draw.integers(0, 3, 40)}
    np.savez(folder / "data.npz", **values)


@contextmanager
def cluster(build: fixture.Build, folder: Path, plant: Callable[[Place], None]) -> Iterator[Commands]:
    """A master, and nodes ada and bob, of which bob has a fault; inside, commands can be typed."""
    (folder / "my_task.py").write_text(TASK)
    (folder / "modules").mkdir()
    (folder / "modules" / "needed_module.py").write_text("")
    usual = {**USUAL, "PYTHONPATH": f"{Path(evener.__file__).parents[1]}{os.pathsep}{folder / 'modules'}"}
    with build(Host(name="hub"), Host(name="ada"), Host(name="bob")) as hosts:
        for machine in hosts.values():
            machine.carry(mtu=9000)
        for name in ("ada", "bob"):
            write_data(folder / f"data-{name}")
            (folder / f"cache-{name}").mkdir()
        place = Place(folder, hosts["bob"], dict(usual), [])
        plant(place)
        address, token = up(hosts, folder, usual)
        join(hosts["ada"], folder, address, token, usual, [])
        join(hosts["bob"], folder, address, token, place.variables, place.prefix)
        wait_for_nodes(hosts["hub"], folder, usual)
        atomic_write(folder / "token", token.encode(), private=True)
        access = ["--master", address, "--token-file", str(folder / "token")]
        yield Commands(hosts["hub"], folder, access, usual)


def up(hosts: Hosts, folder: Path, variables: dict[str, str]) -> tuple[str, str]:
    words = ["up", "--home", str(folder / "home"), "--listen", f"{hosts['hub'].address}:0", "--json"]
    said = json.loads(hosts["hub"].start([*EVENER, *words], environment=variables).wait_for(r"\{.*\}", 60)[0])
    return said["address"], said["token"]


def join(
    machine: Machine, folder: Path, address: str, token: str, variables: dict[str, str], prefix: list[str]
) -> Process:
    name = machine.name
    paths = ["--data", str(folder / f"data-{name}"), "--cache", str(folder / f"cache-{name}")]
    words = ["join", address, "--token", token, "--name", name, "--thin", *paths]
    return machine.start([*prefix, *EVENER, *words], environment=variables)


def wait_for_nodes(hub: Machine, folder: Path, variables: dict[str, str]) -> None:
    until = time.monotonic() + 90
    while True:
        asked = hub.start([*EVENER, "nodes", "--home", str(folder / "home"), "--json"], environment=variables)
        assert asked.wait(60) == 0, asked.transcript()
        nodes = json.loads(asked.text)["nodes"]
        if sum(node["state"] == "present" and node["score"] is not None for node in nodes) == 2:
            return
        assert time.monotonic() < until, nodes


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_doctor_names_a_planted_fault_and_its_remedy_in_time(
    build_hosts: fixture.Build, tmp_path: Path, plant: Callable[[Place], None]
) -> None:
    if plant in (closed_port, one_way_firewall) and shutil.which("iptables") is None:
        pytest.skip("planting a firewall needs iptables")
    what, words = FAULTS[plant]
    with cluster(build_hosts, tmp_path, plant) as commands:
        code, seconds, findings = commands.doctor()
    faults = [one for one in findings if one["severity"] != "ok"]
    told = [f"{one['machine']}: {one['sentence']}; {one['cure']}" for one in faults if one["what"] == what]
    assert any(all(word in one for word in words) for one in told), faults
    assert [one for one in faults if one["what"] not in {what, *OF_THE_MOMENT}] == []
    if what == "port":
        assert not any("bob cannot connect" in one for one in told), told
    assert code == (2 if any(one["severity"] == "error" for one in faults) else 0)
    assert seconds <= MAX_SECONDS, f"{seconds:.1f} s"
    sys.stdout.write(f"{plant.__name__}: {seconds:.1f} s\n")


def test_doctor_finds_no_fault_in_sound_machines_in_20_tries(build_hosts: fixture.Build, tmp_path: Path) -> None:
    with cluster(build_hosts, tmp_path, lambda _: None) as commands:
        for _ in range(20):
            code, seconds, findings = commands.doctor()
            faults = [one for one in findings if one["severity"] != "ok" and one["what"] not in OF_THE_MOMENT]
            assert (code, faults) == (0, []), f"after {seconds:.1f} s"
            links = [one for one in findings if one["what"] == "link"]
            assert [one["machine"] for one in links] == ["ada, bob", "bob, ada"]
            assert all("bit/s came" in one["sentence"] for one in links)


def test_run_reports_faulty_machines_and_continues(build_hosts: fixture.Build, tmp_path: Path) -> None:
    data = str(tmp_path / "data-ada")
    words = ("train", "my_task.py", "--agreement", "sync", "--epochs", "1", "--batch-size", "8", "--data", data)
    with cluster(build_hosts, tmp_path, clock_an_hour_off) as commands:
        looked = commands.start(*words, "--output", "looked")
        assert looked.wait(90) == 0, looked.transcript()
        assert "bob: its clock is 3600 s ahead of that of master" in " ".join(looked.text.split())
        unlooked = commands.start(*words, "--output", "unlooked", "--no-preflight")
        assert unlooked.wait(90) == 0, unlooked.transcript()
        assert "its clock is" not in " ".join(unlooked.text.split())
