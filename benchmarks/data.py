"""Measure how a data set comes to the nodes of a master: time until the first step, and bytes on the master's line.

    python benchmarks/data.py [--megabytes 1000] [--mbit 100] [--agreement sync] [--json]

The machines are network namespaces, each with a line of its own (needs root and iproute2): a master, where the run is
submitted with `--ship-data`, and nodes of speeds 1, 0.5 and 0.25. Sending everything to everybody over the master's
line takes nodes x bytes / rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from data_task import write
from results import Results, open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from hosts import Host, why_not
from hosts.machines import Hosts, Machine
from hosts.network import run

TASK = Path(__file__).with_name("data_task.py")
SPEEDS = {"pc1": 1.0, "pc2": 0.5, "pc3": 0.25}
IMAGE_BYTES = 99_500
SECONDS = 900.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Train once, and count."""
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the data set")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each line")
    parser.add_argument("--agreement", default="sync", help="of the run; ranks: without one")
    parser.add_argument("--epochs", type=int, default=1, help="of the run")
    words = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with open_results(words) as results, tempfile.TemporaryDirectory(prefix="evener-") as name:
        folder = Path(name)
        num_bytes = write(folder / "images", words.megabytes * 10**6 // IMAGE_BYTES)
        with Hosts.build([Host(name=name, mbit=words.mbit) for name in ("server", *SPEEDS)], folder) as hosts:
            measure(hosts, folder, num_bytes, words, results)


def measure(hosts: Hosts, folder: Path, num_bytes: int, words: argparse.Namespace, results: Results) -> None:
    """Start a master and its nodes, train, and add a row with the seconds at which each phase began."""
    server = hosts["server"]
    home = str(folder / "home")
    master = server.start(
        ["evener", "up", "--json", "--listen", f"{server.address}:7117", "--home", home], environment=ENVIRONMENT
    )
    said = json.loads(master.wait_for(r"\{.*\}", SECONDS)[0])
    for name, speed in SPEEDS.items():
        join = ("evener", "join", said["address"], "--token", said["token"], "--name", name, "--speed", str(speed))
        node = hosts[name].start([*join, "--cache", str(folder / name)], environment=ENVIRONMENT)
        node.wait_for("ready for runs", SECONDS)
    agreement = () if words.agreement == "ranks" else ("--agreement", words.agreement)
    before, began = sent_bytes(server), time.time()
    phases: dict[str, float] = {}
    typed = ["evener", "train", str(TASK), "--home", home, "--data", str(folder / "images"), "--ship-data"]
    options = (*agreement, "--epochs", str(words.epochs), "--output", str(folder / "out"))
    training = server.start([*typed, *options], environment=ENVIRONMENT)
    assert training.wait(SECONDS) == 0, training.text
    seconds = time.time() - began
    for line in (folder / "out" / "events.jsonl").read_text().splitlines():
        moment = json.loads(line)
        for kind, event in moment["events"]:
            phases.setdefault(event["what"] if kind == "Phase" else kind, round(moment["time"] - began, 2))
    first_step = phases["Step"]
    to_all = len(SPEEDS) * num_bytes * 8 / (words.mbit * 1e6)
    results.add(
        "{megabytes:.0f} MB to {nodes} nodes at {mbit:g} Mbit/s: first step after {first_step:.1f} s, {share:.1%} of "
        "the {to_all:.0f} s that everything to everybody takes; the run took {seconds:.0f} s, and the line of the "
        "master carried {sent:.3f} times the data; phases {phases}",
        megabytes=num_bytes / 1e6,
        nodes=len(SPEEDS),
        mbit=words.mbit,
        first_step=first_step,
        share=first_step / to_all,
        to_all=to_all,
        seconds=seconds,
        phases=phases,
        sent=(sent_bytes(server) - before) / num_bytes,
    )


def sent_bytes(machine: Machine) -> int:
    """Return the bytes that a machine has sent over its line."""
    file = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(run("ip", "netns", "exec", machine.link.namespace.name, "cat", file))


if __name__ == "__main__":
    main()
