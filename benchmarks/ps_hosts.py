"""Seconds until a network recognises 97 % of MNIST's digits, over machines whose links carry 100 Mbit/s.

    python benchmarks/ps_hosts.py --data FOLDER [--mbit 100] [--cores 0.6] [--target 0.97] [--json]
    python benchmarks/ps_hosts.py --data FOLDER --mbit 10,10,2 --cores 0.8,0.4,0.2 --ways sync,diloco,top-k

Builds a master's host and three nodes' hosts (network namespaces, `tc tbf`, CPU quotas; needs root and iproute2), in
which the real commands run: `evener up`, `evener join`, and `evener train` once for every way to agree. A run is ended
as soon as its accuracy is reached. Seconds are those of the updates, without validation.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from results import open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from evener.records.record import TrainRecord, Validation
from evener.records.schema import read_noun
from hosts import Host, Machine, why_not
from hosts.machines import Hosts
from hosts.process import Process

TASK = str(Path(__file__).with_name("ps_hosts_task.py"))
NODES = ("one", "two", "three")
WAYS: dict[str, Sequence[str]] = {
    "sync": ("--agreement", "sync", "--no-check"),  # the network has BatchNorm, which sync does not train exactly
    "async, no momentum": ("--agreement", "async", "--option", "lr=0.03", "--option", "momentum=0"),
    "average, 20 steps": ("--agreement", "average", "--local-steps", "20"),
    "diloco, 20 steps": ("--agreement", "diloco", "--local-steps", "20"),
    "int8: average, 20 steps": ("--agreement", "average", "--local-steps", "20", "--compress", "int8"),
    "top-k: diloco, 5 steps": ("--agreement", "diloco", "--local-steps", "5", "--compress", "top-k"),
    "top-k: diloco, 20 steps": ("--agreement", "diloco", "--local-steps", "20", "--compress", "top-k"),
}
"""A gradient that is two versions old allows steps of about a third, and no momentum beside it: async diverges with the
others' settings."""
START_SECONDS = 60.0


class Row(NamedTuple):
    """What came of one way.

    Attributes:
        accuracy: of the validation that reached the target, or of the last one.
        seconds: of all updates until then.
        updates: until then.
        megabytes: that the nodes sent and received, validation included.
        computing: share of the seconds that the nodes computed, on average.
    """

    accuracy: float
    seconds: float
    updates: int
    megabytes: float
    computing: float


TABLE = "{way:24} {seconds:8.1f} {ratio:5.1f}x {updates:8} {accuracy:9.2%} {megabytes:9.1f} {computing:10.0%}"


def main() -> None:
    """A row for every way."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four files")
    parser.add_argument("--mbit", type=three, default="100", help="of every node's link, each way; or one a node")
    parser.add_argument("--cores", type=three, default="0.6", help="of every node; or one a node")
    parser.add_argument("--target", type=float, default=0.97, help="accuracy")
    parser.add_argument("--ways", default=",".join(WAYS), help="beginnings of names, separated by commas")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a run, after which it is ended")
    words = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the hosts end as well
    chosen = [name for name in WAYS if any(name == way or name.startswith(way) for way in words.ways.split(","))]
    with open_results(words) as results:
        results.say(
            f"3 nodes of {words.cores} cores and a master, links of {words.mbit} Mbit/s; "
            f"until {words.target:.0%} of 2 000 images\n"
        )
        results.say(
            f"{'way':24} {'seconds':>8} {'ratio':>6} {'updates':>8} {'accuracy':>9} {'MB moved':>9} {'computing':>10}"
        )
        first = 0.0
        for name, row in measure(words, chosen):
            first = first or row.seconds
            results.add(TABLE, way=name, ratio=first / row.seconds, **row._asdict())


def three(text: str) -> list[float]:
    """One number for each node."""
    numbers = [float(number) for number in text.split(",")]
    return numbers * len(NODES) if len(numbers) == 1 else numbers


def measure(words: argparse.Namespace, chosen: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """A row for every way, as it is measured."""
    hosts = [Host(name="master", mbit=max(words.mbit))]
    hosts += [
        Host(name=name, mbit=mbit, cores=cores)
        for name, mbit, cores in zip(NODES, words.mbit, words.cores, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder, Hosts.build(hosts, Path(folder)) as built:
        home = Path(folder) / "home"
        master = built["master"]
        up = start(master, "up", "--listen", f"{master.address}:0", "--json", "--home", str(home))
        said = json.loads(up.wait_for(r"\{.*\}", START_SECONDS)[0])
        for name in NODES:
            cache = ("--cache", str(Path(folder) / name))
            own = ("--name", name, "--device", "cpu", "--data", str(words.data.resolve()), *cache)
            start(built[name], "join", said["address"], "--token", said["token"], *own)
        wait_for_nodes(master, home)
        for name in chosen:
            yield name, train(master, home, words, WAYS[name])


def start(machine: Machine, *words: str) -> Process:
    """A command on a host, with one thread."""
    return machine.start([sys.executable, "-m", "evener", *words], environment={"OMP_NUM_THREADS": "1"})


def wait_for_nodes(master: Machine, home: Path) -> None:
    """Return when all nodes have measured themselves."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        asked = start(master, "nodes", "--json", "--home", str(home))
        asked.wait(START_SECONDS)
        if sum(node["score"] is not None for node in json.loads(asked.text)["nodes"]) == len(NODES):
            return
    raise AssertionError("the nodes did not join")


def train(master: Machine, home: Path, words: argparse.Namespace, way: Sequence[str]) -> Row:
    """One run, ended as soon as it is good enough."""
    output = home / "-".join(way)
    own = ("--data", str(words.data.resolve()), "--home", str(home), "--output", str(output))
    run = start(master, "train", TASK, *way, *own)
    until = time.monotonic() + words.limit
    while run.is_running and time.monotonic() < until:
        found = [float(percent) / 100 for percent in re.findall(r"accuracy ([\d.]+)%", run.text)]
        if found and found[-1] >= words.target:
            break
        time.sleep(0.1)
    run.signal(signal.SIGINT)
    assert run.wait(START_SECONDS) in (0, 130), run.transcript()
    return row_of(read_noun(output / "record.json", TrainRecord), words.target)


def row_of(record: TrainRecord, target: float) -> Row:
    """What a record says of the way to the target."""
    reached = next((v for v in record.validations if good(v) >= target), record.validations[-1])
    steps = [step for step in record.steps if step.step <= reached.step]
    seconds = sum(step.seconds for step in steps)
    computing = sum(node.compute_seconds for step in steps for node in step.nodes) / (len(NODES) * seconds)
    moved = sum(node.bytes_sent + node.bytes_received for node in record.nodes)
    return Row(good(reached), seconds, reached.step, moved / 1e6, computing)


def good(validation: Validation) -> float:
    return validation.accuracy or 0.0


if __name__ == "__main__":
    main()
