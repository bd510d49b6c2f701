"""Seconds until tools for training on several machines reach an accuracy, on three machines of unequal speed.

    python benchmarks/race/race.py --data FOLDER [--network mlp] [--scenarios calm,slow] [--mbit 1000,100] [--json]

Hosts are network namespaces with CPU quotas of 0.8, 0.4 and 0.2 cores (needs root and iproute2). All contestants train
a network of `workload.py` on the same images with the same learning rate, and test it on 1000 images after every 21
steps of 147 samples. Where nodes step alone, their batches have 21 to 49 samples. The clock starts with the first step;
`start` is the time before it. In `slow` the second node gets a third of its cores after 10 s, in `killed` it is killed
every 30 s and started again 5 s later, in `joins` a fourth node of 0.2 cores comes after 10 s. The Python running this
has to have the contestants' packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from course import Contestant, Course, Node, Started
from results import open_results, parser_of

from hosts import Host, groups, why_not
from hosts.machines import Hosts
from hosts.network import run
from hosts.process import Process

ORDER = (
    "alone", "alone_small", "ddp", "ddp_uneven", "torchft_gloo", "hivemind_local", "flower_fedavg",
    "ray_train", "evener_ranks", "evener_auto", "evener_diloco",
)  # fmt: skip
SCENARIOS = ("calm", "slow", "killed", "joins")
CORES = {"one": 0.8, "two": 0.4, "three": 0.2, "four": 0.2}
CHANGE_SECONDS, KILL_SECONDS, AWAY_SECONDS = 10.0, 30.0, 5.0
START_SECONDS, POLL_SECONDS = 120.0, 0.05
WITH_NAMES = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
"""Runs a command where the hosts know each other's names, as in a local network."""
TABLE = "{scenario:7} {mbit:5g} {title:24} {seconds:8.1f} {start:6.1f} {steps:6} {speed:8.2f} {megabytes:8.1f} {end}"


def main() -> None:
    """Run every contestant in every scenario over every line."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four files")
    parser.add_argument("--network", default="cnn", choices=("cnn", "mlp"))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--mbit", default="1000,100,10", help="of every line, each way")
    parser.add_argument("--contestants", default=",".join(ORDER))
    parser.add_argument("--target", type=float, default=0.975, help="accuracy")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after the first step")
    words = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the hosts end as well
    with open_results(words) as results:
        results.say(f"{'':7} {'Mbit':>5} {'':24} {'seconds':>8} {'start':>6} {'steps':>6} {'steps/s':>8} {'MB':>8}")
        for scenario in words.scenarios.split(","):
            for mbit in map(float, words.mbit.split(",")):
                for name in words.contestants.split(","):
                    contestant: Contestant = import_module(f"contestants.{name}").CONTESTANT
                    row = measure(contestant, scenario, mbit, words)
                    results.add(TABLE, scenario=scenario, mbit=mbit, title=contestant.title, **row)


def measure(contestant: Contestant, scenario: str, mbit: float, words: argparse.Namespace) -> dict[str, Any]:
    """Return what came of one contestant."""
    try:
        found = {"version": version(contestant.package), "page": contestant.page}
    except PackageNotFoundError:
        return _row(end=f"{contestant.package} is not installed")
    names = list(CORES) if scenario == "joins" else list(CORES)[:3]
    hosts = [Host(name=name, mbit=mbit, cores=CORES[name]) for name in names] + [Host(name="master", mbit=mbit)]
    with tempfile.TemporaryDirectory() as folder, Hosts.build(hosts, Path(folder)) as built:
        race = _Race(built, Path(folder), names, words)
        return {**race.watch(contestant, scenario), **found}


def _row(**known: Any) -> dict[str, Any]:
    nothing = {"seconds": float("inf"), "start": 0.0, "steps": 0, "speed": 0.0, "megabytes": 0.0, "accuracies": []}
    return {**nothing, "end": "", **known}


class _Race:
    """One contestant on its hosts."""

    def __init__(self, built: Hosts, folder: Path, names: Sequence[str], words: argparse.Namespace) -> None:
        self._built, self._words = built, words
        self._command: Callable[[Node], Sequence[str]] | None = None
        self._names = folder / "hosts"
        addresses = {"localhost": "127.0.0.1", **{name: machine.address for name, machine in built.items()}}
        self._names.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        nodes = [Node(name=name, address=built[name].address, cores=CORES[name]) for name in names]
        self.course = Course(
            nodes=nodes[:3], all_nodes=nodes, master=built["master"].address, network=words.network,
            data=words.data.resolve(), folder=folder, start=self._start, start_nodes=self._start_nodes,
            wait_for_nodes=self._wait_for_nodes,
        )  # fmt: skip

    def watch(self, contestant: Contestant, scenario: str) -> dict[str, Any]:
        """Return its row, once the accuracy is reached, or the time is over."""
        launched, before = time.time(), self._bytes()
        try:
            process = contestant.launch(self.course)
            assert isinstance(process, Process)
            process.wait_for(contestant.begins, START_SECONDS)
        except AssertionError as error:  # of a command that ended, or said nothing
            said = [started.text[-200:] for started in self._built.processes if not started.is_running]
            return _row(end=f"did not start: {str(error)[-100:]} {said}")
        begin, events = time.time(), self._events(scenario)
        seen: list[tuple[float, float]] = []
        row = partial(self._row, seen, contestant.steps, begin - launched, before)
        while (now := time.time() - begin) < self._words.limit:
            lines = dict.fromkeys(
                re.findall(r".*accuracy +[\d.]+%", process.text)
            )  # Ray's nodes of one machine repeat them
            found = [float(line.rpartition(" ")[2][:-1]) / 100 for line in lines]
            seen += [(now, accuracy) for accuracy in found[len(seen) :]]
            if any(accuracy >= self._words.target for _, accuracy in seen):
                return row(seconds=seen[-1][0])
            if not process.is_running:
                return row(end=f"ended: {process.text.splitlines()[-1:]}")
            while events and now >= events[0][0]:
                events.pop(0)[1]()
            time.sleep(POLL_SECONDS)
        return row(end=f"not within {self._words.limit:g} s")

    def _row(
        self, seen: list[tuple[float, float]], between: int, start: float, before: int, **more: Any
    ) -> dict[str, Any]:
        steps, moved = between * len(seen), (self._bytes() - before) / 1e6
        speed = steps / seen[-1][0] if seen else 0.0
        return _row(start=start, steps=steps, speed=speed, megabytes=moved, accuracies=seen, **more)

    def _start(self, host: str, command: Sequence[str]) -> Process:
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        paths = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        return self._built[host].start(
            [*WITH_NAMES, str(self._names), *command],
            environment={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": paths,
                "PATH": commands,
                "RACE_NETWORK": self._words.network,
            },
            cwd=self.course.folder,
        )

    def _start_nodes(self, command: Callable[[Node], Sequence[str]], nodes: Sequence[Node]) -> list[Started]:
        self._command = command
        return [self._start(node.name, command(node)) for node in nodes]

    def _wait_for_nodes(self, command: Sequence[str]) -> None:
        """Return when `command`, `evener nodes --json`, shows that all nodes have measured themselves."""
        deadline = time.time() + START_SECONDS
        while time.time() < deadline:
            asked = self._built["master"].start(command, environment={"OMP_NUM_THREADS": "1"})
            asked.wait(START_SECONDS)
            nodes = json.loads(asked.text)["nodes"]
            if sum(node["score"] is not None for node in nodes) == len(self.course.nodes):
                return
        raise AssertionError("the nodes did not join")

    def _bytes(self) -> int:
        """Return the bytes that the hosts have sent."""
        total = 0
        for machine in self._built.values():
            said = run("ip", "-n", machine.link.namespace.name, "-s", "-j", "link", "show", "eth0")
            total += json.loads(said)[0]["stats64"]["tx"]["bytes"]
        return total

    def _events(self, scenario: str) -> list[tuple[float, Callable[[], None]]]:
        """Return what happens when, in seconds after the first step."""
        if scenario == "slow":
            return [(CHANGE_SECONDS, self._slow_down)]
        if scenario == "joins":
            return [(CHANGE_SECONDS, lambda: self._come("four"))]
        if scenario != "killed":
            return []
        times = [KILL_SECONDS * i for i in range(1, int(self._words.limit / KILL_SECONDS) + 1)]
        kills = [(at, self._kill) for at in times]
        returns = [(at + AWAY_SECONDS, lambda: self._come("two")) for at in times]
        return sorted([*kills, *returns], key=lambda event: event[0])

    def _slow_down(self) -> None:
        """Leave the second node a third of its cores."""
        controller = groups.find("cpu")
        assert controller is not None
        controller.make(self._built["two"].link.namespace.name, CORES["two"] / 3)

    def _kill(self) -> None:
        """Kill every process of the second node."""
        for pid in {pid for group in self._built["two"].groups for pid in groups.processes_of(group)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _come(self, host: str) -> None:
        """Start the command of a node that comes; a contestant on one node alone has none."""
        if self._command is not None:
            (node,) = [node for node in self.course.all_nodes if node.name == host]
            self._start(host, self._command(node))


if __name__ == "__main__":
    main()
