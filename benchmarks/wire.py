"""What framing, authentication and TLS cost beside bare sockets that carry the same bytes; ways in turn, in one run.

    python benchmarks/wire.py [--megabytes 400] [--rounds 5000] [--blocks 5] [--json]

Every way has its own connections between the same processes on one loopback. `bare` is what one writes with Python's
sockets alone (bare_sockets.py). Ratios are medians over the blocks, each of which runs all ways once.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection as Pipe
from statistics import median

import msgspec
from bare_sockets import LOOPBACK, BareMaster, BareNode
from results import Results, open_results, parser_of
from turns import in_turn, ratios

from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, Token, make_identity
from evener.wire.limits import Limits
from evener.wire.server import Server
from evener.wire.server_events import FrameReceived, PeerConnected

SMALL_BYTES = 101_800
"""25 450 float32 parameters."""
TINY_BYTES = 8
NUM_NODES = 3
WAYS = ("bare", "plain", "tls")
LIMITS = Limits(patience=60)


class Push(msgspec.Struct, tag=True):
    """From a node to the master."""

    round: int


class Weights(msgspec.Struct, tag=True):
    """From the master to a node."""

    round: int


class WireNode:
    """A node on a `Connection`."""

    def __init__(self, address: Address, token: Token, size: int) -> None:
        self.connection: Connection[Weights] = open_connection(address, token, Weights, LIMITS)
        self.memory = memoryview(bytearray(b"\1") * size)
        self.round = 0

    def push(self, size: int) -> None:
        """Send `size` bytes of the memory."""
        self.connection.send(Push(self.round), [self.memory[:size]])
        self.round += 1

    def pull(self, size: int) -> None:
        """Receive `size` bytes into the memory."""
        self.connection.receive(lambda *_: [self.memory[:size]])


class WireMaster:
    """A master that serves a `Server`."""

    def __init__(self, num_nodes: int, size: int, insecure: bool) -> None:
        identity = make_identity(insecure=insecure)
        self.token = identity.token
        self.server: Server[Push] = Server(Push, identity, LIMITS, place=self._place)
        self.address = self.server.listen(Address(LOOPBACK))
        self.memory = memoryview(bytearray(b"\2") * size)
        self.places = [memoryview(bytearray(b"\0") * size) for _ in range(num_nodes)]
        self.round = 0

    def admit(self) -> None:
        """Take all nodes in."""
        opened = 0
        while opened < len(self.places):
            opened += self._count(PeerConnected)

    def gather(self, _size: int) -> None:
        """Receive what every node pushes."""
        arrived = 0
        while arrived < len(self.places):
            arrived += self._count(FrameReceived)

    def scatter(self, size: int) -> None:
        """Send `size` bytes to every node."""
        for peer in self.server.peers:
            self.server.send(peer, Weights(self.round), [self.memory[:size]])
        self.round += 1

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        while any(map(self.server.is_sending, self.server.peers)):
            self.server.poll(1.0)

    def _place(self, peer: int, _header: Push, lengths: tuple[int, ...]) -> list[memoryview]:
        return [self.places[peer][: lengths[0]]]

    def _count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.server.poll(1.0))


class Step(msgspec.Struct, frozen=True):
    """Rounds of one way: every node pushes, then the master answers all."""

    way: str
    rounds: int
    push_bytes: int
    pull_bytes: int


def run_node(port: int, doors: dict[str, tuple[str, str]], size: int, pipe: Pipe) -> None:
    """Connect in every way, then do a node's part of every step that comes through the pipe."""
    nodes: dict[str, BareNode | WireNode] = {"bare": BareNode(port, size)}
    for way, (address, token) in doors.items():
        nodes[way] = WireNode(Address.parse(address), Token.parse(token), size)
    while (step := pipe.recv()) is not None:
        node, busy = nodes[step.way], time.process_time()
        for _ in range(step.rounds):
            node.push(step.push_bytes)
            node.pull(step.pull_bytes)
        pipe.send(time.process_time() - busy)


class Measured(msgspec.Struct, frozen=True):
    """What one step took."""

    seconds: float
    master_seconds: float
    """Of processor time."""
    node_seconds: float
    """Of processor time, mean over the nodes."""


class Bench:
    """A master in this process and nodes in others, connected in every way."""

    def __init__(self, num_nodes: int, size: int) -> None:
        self.masters: dict[str, BareMaster | WireMaster] = {"bare": BareMaster(num_nodes, size)}
        self.masters |= {way: WireMaster(num_nodes, size, insecure=way == "plain") for way in WAYS[1:]}
        doors = {way: (str(m.address), m.token.text) for way, m in self.masters.items() if isinstance(m, WireMaster)}
        bare = self.masters["bare"]
        assert isinstance(bare, BareMaster)
        context = multiprocessing.get_context("forkserver")
        self.pipes, self.processes = [], []
        for _ in range(num_nodes):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_node, args=(bare.port, doors, size, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for way in WAYS:
            self.masters[way].admit()

    def run(self, step: Step) -> Measured:
        """Do one step."""
        master = self.masters[step.way]
        for pipe in self.pipes:
            pipe.send(step)
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(step.rounds):
            master.gather(step.push_bytes)
            master.scatter(step.pull_bytes)
        master.settle()
        nodes = [pipe.recv() for pipe in self.pipes]
        seconds, master_seconds = time.perf_counter() - began, time.process_time() - busy
        return Measured(seconds, master_seconds, sum(nodes) / len(nodes))

    def close(self) -> None:
        """End the nodes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def compare(num_nodes: int, push_bytes: int, pull_bytes: int, rounds: int, blocks: int) -> dict[str, list[Measured]]:
    """What `blocks` blocks took in every way, after one that warms up."""
    bench = Bench(num_nodes, max(push_bytes, pull_bytes))
    ways = {way: partial(bench.run, Step(way, rounds, push_bytes, pull_bytes)) for way in WAYS}
    taken = in_turn(ways, blocks)
    bench.close()
    return taken


def rates(taken: dict[str, list[Measured]], units: float) -> dict[str, list[float]]:
    """How many of `units` a second in every way, by blocks."""
    return {way: [units / measured.seconds for measured in blocks] for way, blocks in taken.items()}


def show_large(results: Results, name: str, num_bytes: int, taken: dict[str, list[Measured]]) -> None:
    """Rates of a large transfer."""
    rate = rates(taken, num_bytes / 1e6)
    for way in WAYS:
        results.add(
            "{what:24} {way:6} {mb_per_second:8.0f} MB/s   {of_bare.median:7.1%} of the bare rate",
            what=name,
            way=way,
            mb_per_second=median(rate[way]),
            of_bare=ratios(rate[way], rate["bare"]),
        )


def show_small(results: Results, name: str, nodes: int, rounds: int, taken: dict[str, list[Measured]]) -> None:
    """Rounds per second, and processor time that a message costs more than on a bare socket, on each side."""
    rate = rates(taken, rounds)
    for way in WAYS:
        pairs = list(zip(taken[way], taken["bare"], strict=True))
        master = median(a.master_seconds - b.master_seconds for a, b in pairs) / (2 * rounds * nodes)
        node = median(a.node_seconds - b.node_seconds for a, b in pairs) / (2 * rounds)
        results.add(
            "{what:24} {way:6} {rounds_per_second:8.0f} rounds/s {of_bare.median:6.2f} x the bare time"
            "   +{master_us:.1f} us a message at the master, +{node_us:.1f} us at the node",
            what=name,
            way=way,
            rounds_per_second=median(rate[way]),
            of_bare=ratios([m.seconds for m in taken[way]], [m.seconds for m in taken["bare"]]),
            master_us=1e6 * master,
            node_us=1e6 * node,
        )


def main() -> None:
    """All transfers, and one table."""
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--blocks", type=int, default=5)
    words = parser.parse_args()
    large, rounds, blocks = words.megabytes * 10**6, words.rounds // words.blocks, words.blocks
    with open_results(words) as results:
        show_large(results, "node to master", large, compare(1, large, TINY_BYTES, 1, blocks))
        show_large(results, "master to node", large, compare(1, TINY_BYTES, large, 1, blocks))
        for nodes, size, name in (
            (NUM_NODES, SMALL_BYTES, "3 x 101 800 B each way"),
            (1, TINY_BYTES, "1 x 8 B each way"),
        ):
            show_small(results, name, nodes, rounds, compare(nodes, size, size, rounds, blocks))


if __name__ == "__main__":
    main()
