"""Measure the cost of a relay: a master and nodes, each behind a NAT of its own, against a master reached directly.

    python benchmarks/relay.py [--mbit 100] [--relay-mbit 1000] [--rounds 3] [--peers 32] [--json]

The machines are network namespaces with CPU quotas (needs root, iproute2 and nftables); a router in front of a machine
translates its address and drops connections from outside. Both ways train the same task on the same nodes, by turns.
A last row has so many connections that all carry data, and the memory of the relay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from results import Results, open_results, parser_of
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, make_identity
from evener.wire.limits import Limits
from evener.wire.relay_lines import RelayLines
from evener.wire.server import Server
from evener.wire.server_events import FrameReceived

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from hosts import Host, why_not
from hosts.machines import Hosts
from hosts.network import Link, delete, run
from hosts.process import Process

TASK = Path(__file__).with_name("relay_task.py")
NODES = ("pc1", "pc2")
WAYS: dict[str, tuple[str, ...]] = {
    "sync": ("--agreement", "sync", "--option", "samples=1280"),  # 20 steps an epoch, of 0.7 s at 100 Mbit/s
    "diloco": ("--agreement", "diloco", "--local-steps", "10"),
}
SECONDS = 180.0
FRAME_BYTES = 1 << 20
FRAMES = 8
KEY = "a key of a relay for a benchmark"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "EVENER_RELAY_KEY": KEY}
FIREWALL = """
table inet home {
    chain outside {
        type filter hook input priority 0
        iifname "wan" ct state new drop
    }
    chain through {
        type filter hook forward priority 0
        iifname "wan" ct state new drop
    }
    chain leaving {
        type nat hook postrouting priority 100
        oifname "wan" masquerade
    }
}
"""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """A frame of the row with many connections."""


def main() -> None:
    """Train directly and through the relay by turns; then load the relay."""
    parser = parser_of(__doc__)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each line")
    parser.add_argument("--relay-mbit", type=float, default=0.0, help="of the relay's line, if it is another one")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--epochs", type=int, default=2, help="of each run")
    parser.add_argument("--peers", type=int, default=32, help="connections of the last row")
    words = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with open_results(words) as results, tempfile.TemporaryDirectory(prefix="evener-") as name:
        folder = Path(name)
        (folder / "key").write_text(KEY)
        (folder / "key").chmod(0o600)
        machines = [Host(name=name, cores=0.4, mbit=words.mbit) for name in ("server", "home", *NODES)]
        machines.append(Host(name="relay", cores=0.4, mbit=words.relay_mbit or words.mbit))
        with Hosts.build(machines, folder) as hosts, behind_nat([hosts[name].link for name in ("home", *NODES)], words):
            train(hosts, folder, words, results)
        load(folder, words, results)


@contextmanager
def behind_nat(links: Sequence[Link], words: argparse.Namespace) -> Iterator[None]:
    """Put a router between each of these machines and its line."""
    routers: list[str] = []
    try:
        for link in links:
            inside, router = link.namespace.name, f"{link.name}.{link.host}-router"
            run("ip", "netns", "add", router)
            routers.append(router)
            run("ip", "-n", inside, "link", "set", "eth0", "netns", router, "name", "wan")
            run("ip", "-n", router, "address", "add", f"{link.address}/24", "dev", "wan")
            run("ip", "-n", router, "link", "set", "wan", "up")
            run("ip", "-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", inside)
            for namespace, device, address in ((router, "lan", "192.168.1.1"), (inside, "eth0", "192.168.1.2")):
                run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device)
                run("ip", "-n", namespace, "link", "set", device, "up")
            run("ip", "-n", inside, "route", "add", "default", "via", "192.168.1.1")
            run("ip", "netns", "exec", router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
            run("ip", "netns", "exec", router, "nft", FIREWALL)
            burst = str(int(words.mbit * 1e6 / 8 * 0.005))
            shape = ("tbf", "rate", f"{words.mbit}mbit", "burst", burst, "latency", "400ms")
            run("tc", "-n", router, "qdisc", "replace", "dev", "wan", "root", *shape)
        yield
    finally:
        for router in routers:
            delete(router)


def train(hosts: Hosts, folder: Path, words: argparse.Namespace, results: Results) -> None:
    """Train every way directly and through the relay, and compare."""
    relay = hosts["relay"]
    passing = relay.start(
        ["evener", "relay", "--listen", f"{relay.address}:7119", "--key-file", str(folder / "key"), "--json"],
        environment=ENVIRONMENT,
    )
    passing.wait_for(r"\{.*\}", SECONDS)
    masters = {"server": up(hosts, folder, "server"), "home": up(hosts, folder, "home", "--relay", relay_of(hosts))}
    assert masters["home"]["address"] == relay_of(hosts), masters
    for name in NODES:
        for master, said in masters.items():
            join = ("evener", "join", said["address"], "--token", said["token"], "--name", name)
            hosts[name].start([*join, "--cache", str(folder / f"{master}-{name}")], environment=ENVIRONMENT)
            wait_for_nodes(hosts, folder, master, NODES.index(name) + 1)
        if name == NODES[0]:
            compare(hosts, folder, "diloco", "one node", words, results)  # several divide steps as their speeds vary
    for way in WAYS:
        compare(hosts, folder, way, "two nodes", words, results)
    results.add("relay: {megabytes:.1f} MB with 2 nodes", megabytes=memory_of(passing.pid))


def relay_of(hosts: Hosts) -> str:
    """Return the address of the relay."""
    return f"{hosts['relay'].address}:7119"


def up(hosts: Hosts, folder: Path, name: str, *options: str) -> dict[str, str]:
    """Start a master; return its address and token."""
    address = hosts[name].address if name == "server" else "192.168.1.2"
    home = ("--listen", f"{address}:7117", "--home", str(folder / name))
    master = hosts[name].start(["evener", "up", "--json", *home, *options], environment=ENVIRONMENT)
    said: dict[str, str] = json.loads(master.wait_for(r"\{.*\}", SECONDS)[0])
    return said


def wait_for_nodes(hosts: Hosts, folder: Path, master: str, number: int) -> None:
    """Wait until so many nodes have measured their devices."""
    until = time.monotonic() + SECONDS
    while sum(node["score"] is not None for node in nodes_of(hosts, folder, master)) < number:
        assert time.monotonic() < until, "the nodes did not join"
        time.sleep(1)


def compare(hosts: Hosts, folder: Path, way: str, nodes: str, words: argparse.Namespace, results: Results) -> None:
    """Train by turns at both masters; add a row."""
    rates: dict[str, list[float]] = {"server": [], "home": []}
    for number in range(words.rounds):
        for name, found in rates.items():
            output = folder / f"{way}-{nodes}-{name}-{number}"
            line = ["evener", "train", str(TASK), "--home", str(folder / name), "--output", str(output)]
            typed = ["--precision", "fp64", "--epochs", str(words.epochs), *WAYS[way]]
            finish(hosts[name].start([*line, *typed], environment=ENVIRONMENT))
            record = read_noun(output / "record.json", TrainRecord)
            found.append(sum(step.samples for step in record.steps) / record.seconds)
    pairs = [relayed / direct for direct, relayed in zip(rates["server"], rates["home"], strict=True)]
    first, second = (load_file(folder / f"{way}-{nodes}-{name}-0" / "model.safetensors") for name in rates)
    results.add(
        "{way:7} {nodes}: {direct:7.1f} samples/s directly, {relayed:7.1f} through the relay: ratio {ratio:.3f} "
        "(pairs {lowest:.3f} to {highest:.3f}); weights differ by {off:.1e}",
        way=way,
        nodes=nodes,
        direct=statistics.median(rates["server"]),
        relayed=statistics.median(rates["home"]),
        ratio=statistics.median(pairs),
        lowest=min(pairs),
        highest=max(pairs),
        off=max(float((first[name].double() - second[name].double()).abs().max()) for name in first),
    )


def nodes_of(hosts: Hosts, folder: Path, master: str) -> list[dict[str, object]]:
    """Return what `evener nodes --json` says."""
    asked = hosts[master].start(["evener", "nodes", "--json", "--home", str(folder / master)])
    finish(asked)
    nodes: list[dict[str, object]] = json.loads(asked.text)["nodes"]
    return nodes


def finish(command: Process) -> None:
    """Wait for a command, which has to succeed."""
    assert command.wait(SECONDS) == 0, command.text


def memory_of(pid: int) -> float:
    """Return the highest memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def load(folder: Path, words: argparse.Namespace, results: Results) -> None:
    """Let many connections carry data through a relay at once, both ways; add its memory."""
    with Hosts.build([Host(name="relay")], folder) as hosts:
        relay = hosts["relay"]
        command = ["evener", "relay", "--listen", f"{relay.address}:7119", "--key-file", str(folder / "key"), "--json"]
        passing = relay.start(command)
        passing.wait_for(r"\{.*\}", SECONDS)
        inside = relay.start([sys.executable, __file__, "--carry", str(words.peers), f"{relay.address}:7119"])
        finish(inside)
        said = json.loads(inside.text.splitlines()[-1])
        form = "relay: {megabytes:.1f} MB with {peers} connections that carry {rate:.0f} MB/s"
        results.add(form, megabytes=memory_of(passing.pid), peers=words.peers, rate=said["megabytes_per_second"])


def carry(peers: int, relay: str) -> None:
    """Be a master and its nodes, which send frames through a relay; print the rate."""
    identity = make_identity()
    server: Server[Ping] = Server(Ping, identity, Limits())
    lines = RelayLines(Address.parse(relay), KEY, 15.0, print)
    lines.start()
    server.listen_by(lines)
    frame = bytes(FRAME_BYTES)

    def node() -> None:
        connection: Connection[Ping] = open_connection(Address.parse(relay), identity.token, Ping, Limits(), seconds=60)
        with connection:
            for _ in range(FRAMES):
                connection.send(Ping(), [frame])
                connection.receive()

    nodes = [threading.Thread(target=node) for _ in range(peers)]
    begun = time.monotonic()
    for one in nodes:
        one.start()
    answered = 0
    while answered < peers * FRAMES:
        for event in server.poll(1.0):
            if isinstance(event, FrameReceived):
                server.send(event.peer, Ping(), [frame])
                answered += 1
    until = time.monotonic() + SECONDS
    while any(one.is_alive() for one in nodes) and time.monotonic() < until:
        server.poll(0.1)
    seconds = time.monotonic() - begun
    server.close()
    sys.stdout.write(json.dumps({"megabytes_per_second": 2 * answered * FRAME_BYTES / 1e6 / seconds}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--carry"]:
        carry(int(sys.argv[2]), sys.argv[3])
    else:
        main()
