"""Small synchronous updates: master and nodes as they are, against bare sockets that carry the same bytes; in one run.

    python benchmarks/ps.py [--updates 5000] [--nodes 3] [--blocks 5] [--checks] [--profile] [--json]

The model has 25 450 float32 parameters, as in the experiment of the NfNN monograph, whose C program took 232 s for 5000
updates in a data centre. The gradient is a constant: what is measured is agreeing. Everything runs on one loopback:
`bare` sends every node's bytes to a process that reads them with a select loop and sends as many back, and does nothing
else; `bare tls` does so over Python's own SSL sockets; `ps` is a master with its nodes, a whole run of it, without
TLS; `ps tls` is the same with it. Ratios are medians over the blocks, each of which runs all ways once: of seconds,
and of the processor time of all processes together, which does not depend on what else the machine does.

With `--checks` there are two ways instead: `ps`, and `trusting`, a master that believes its nodes. It looks at no
contribution, whether finite or opposed to all others, and at no clock for their speeds; what the decoder checks of
every field stays.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import platform
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

import msgspec
import numpy as np
import psutil
from bare_sockets import LOOPBACK, BareMaster, BareNode
from results import Results, open_results, parser_of
from turns import in_turn, ratios

from evener.agreements import aggregator
from evener.agreements.layout import Flat, StateLayout, layout_of
from evener.agreements.messages import Lease
from evener.agreements.outlier_detection import OutlierDetector
from evener.agreements.settings import Sgd, Workload, synchronous
from evener.agreements.worker_record import WorkerRecord
from evener.ps.client import MasterClient
from evener.ps.master.master import Master
from evener.ps.node.engine import EngineSetup, NodeEngine
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol.config import MasterConfig, StateDir, Versions
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Header
from evener.records.profile import DeviceProfile
from evener.records.record import TrainRecord
from evener.system.pace import StepSeconds
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.identity import Address, Token, make_identity
from evener.wire.limits import Limits

PARAMETERS = 25_450
PUBLISHED_SECONDS, PUBLISHED_UPDATES = 232.0, 5000
PATIENCE = 60.0
VERSIONS = Versions("benchmark", platform.python_version(), "")


class ConstantEngine:
    """A gradient of ones, whatever the weights."""

    unused: tuple[int, ...] = ()

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout

    def load(self, weights: Flat) -> None:
        """The weights do not matter."""

    def gradient(self, lease: Lease, into: Flat) -> float:
        """Ones."""
        into.parameters[0].fill(1.0)
        return 0.0

    def local_steps(self, lease: Lease, into: Flat) -> float:
        """Not part of this."""
        raise AssertionError(lease)

    def step_seconds(self) -> StepSeconds:
        """Return about what it takes."""
        return StepSeconds(fixed=0.0, each=1e-6)

    def validate(self, weights: Flat, first: int, size: int) -> tuple[float, float]:
        """Not part of this."""
        raise AssertionError(first)

    def close(self) -> None:
        """Nothing to let go of."""


def build(setup: EngineSetup) -> NodeEngine:
    """The engine of every node."""
    return ConstantEngine(setup.job.layout)


def measure(name: str) -> DeviceProfile:
    """A profile that says nothing."""
    return DeviceProfile(node=name, device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)


def trust() -> None:
    """Have the master of this process believe its nodes from now on."""

    def no_one(*_: object) -> list[int]:
        return []

    def surely(*_: object) -> bool:
        return True

    def unseen(*_: object) -> None:
        return None

    mock.patch.object(OutlierDetector, "examine", no_one).start()
    mock.patch.object(aggregator, "is_finite", surely).start()
    mock.patch.object(WorkerRecord, "give", unseen).start()
    mock.patch.object(WorkerRecord, "seen", unseen).start()


def be_master(folder: str, tls: bool, profiled: bool, trusting: bool, ready: Pipe) -> None:
    """A master; shows where its time went if `profiled`."""
    if trusting:
        trust()
    identity = make_identity(insecure=not tls)
    master = Master(MasterConfig(StateDir(Path(folder)), identity, VERSIONS, {}, PATIENCE, lambda _: None))
    ready.send((str(master.listen(Address(LOOPBACK))), identity.token.text))
    profile = cProfile.Profile() if profiled else None
    try:
        if profile is None:
            master.serve()
        else:
            profile.runcall(master.serve)
    finally:
        master.close()
        if profile is not None:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def be_node(name: str, address: str, token: str) -> None:
    """A node."""

    def dial(seconds: float, patience: float) -> Connection[Header]:
        return open_connection(
            Address.parse(address), Token.parse(token), ToNode, Limits(patience=patience), seconds=seconds
        )

    with tempfile.TemporaryDirectory() as cache:
        abilities = NodeConfig(name, "cpu", 1.0, None, Path(cache), VERSIONS, partial(measure, name), build)
        Node(abilities, dial, lambda _: None).serve()


class Measured(NamedTuple):
    """What a number of updates took.

    Attributes:
        seconds: of time.
        master: seconds of the master's processor.
        everybody: seconds of the processors of all processes.
    """

    seconds: float
    master: float
    everybody: float


def busy_seconds(processes: Sequence[BaseProcess]) -> list[float]:
    """Processor time of each process so far."""
    return [sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes]


class MasterAndNodes:
    """A master and nodes that wait for runs."""

    def __init__(
        self, num_nodes: int, folder: str, *, tls: bool, profiled: bool = False, trusting: bool = False
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        self.processes = [context.Process(target=be_master, args=(folder, tls, profiled, trusting, theirs))]
        self.processes[0].start()
        address, token = ours.recv()
        self.where = Address.parse(address), Token.parse(token), PATIENCE
        self.processes += [
            context.Process(target=be_node, args=(f"node-{i}", address, token)) for i in range(num_nodes)
        ]
        for process in self.processes[1:]:
            process.start()
        with MasterClient(*self.where) as control:
            while len(control.ask().nodes) < num_nodes:
                time.sleep(0.05)

    def run(self, num_updates: int) -> Measured:
        """A whole run, from the first lease on."""
        weights = {"weights": np.zeros(PARAMETERS, np.float32)}
        job = Job(
            run=f"run-{time.time_ns()}",
            task="constant",
            title="constant",
            agreement_name="sync",
            agreement=synchronous(batch=96, outer=Sgd(learning_rate=0.01)),
            workload=Workload(num_samples=96 * num_updates, num_updates=num_updates),
            layout=layout_of(weights),
        )
        flat = Flat(job.layout)
        busy = busy_seconds(self.processes)
        with MasterClient(*self.where) as control:
            control.submit(job, flat, [])
            result = control.watch(job.run, lambda _: None, lambda: None)
        after = busy_seconds(self.processes)
        record = msgspec.json.decode(result.record, type=TrainRecord)
        assert record.steps[-1].step == num_updates
        return Measured(sum(step.seconds for step in record.steps), after[0] - busy[0], sum(after) - sum(busy))

    def close(self) -> None:
        """End all processes."""
        with MasterClient(*self.where) as control:
            control.down()
        for process in self.processes:
            process.join()


def be_bare_node(port: int, size: int, tls: bool, rounds: Pipe) -> None:
    """Send, then receive, as often as it is told."""
    node = BareNode(port, size, tls=tls)
    while (count := rounds.recv()) is not None:
        for _ in range(count):
            node.push(size)
            node.pull(size)


class Bare:
    """Processes on bare sockets that send the same bytes in the same pattern."""

    def __init__(self, num_nodes: int, *, tls: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self.size = 4 * PARAMETERS
        self.master = BareMaster(num_nodes, self.size, tls=tls)
        pairs = [context.Pipe() for _ in range(num_nodes)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=be_bare_node, args=(self.master.port, self.size, tls, theirs)) for _, theirs in pairs
        ]
        for process in self.processes:
            process.start()
        self.master.admit()

    def run(self, num_updates: int) -> Measured:
        """So many rounds; this process is the master."""
        for pipe in self.pipes:
            pipe.send(num_updates)
        begun, busy, others = time.perf_counter(), time.process_time(), sum(busy_seconds(self.processes))
        for _ in range(num_updates):
            self.master.gather(self.size)
            self.master.scatter(self.size)
        seconds, own = time.perf_counter() - begun, time.process_time() - busy
        return Measured(seconds, own, own + sum(busy_seconds(self.processes)) - others)

    def close(self) -> None:
        """End the nodes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def main() -> None:
    """All ways, and one table."""
    parser = parser_of(__doc__)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--checks", action="store_true", help="what checking costs, instead of the other ways")
    parser.add_argument("--profile", action="store_true", help="show where the master's time goes")
    words = parser.parse_args()
    with (
        open_results(words) as results,
        tempfile.TemporaryDirectory() as plain,
        tempfile.TemporaryDirectory() as secret,
    ):
        checked = MasterAndNodes(words.nodes, plain, tls=False, profiled=words.profile)
        ways: dict[str, Bare | MasterAndNodes] = {"ps": checked}
        if words.checks:
            ways["trusting"] = MasterAndNodes(words.nodes, secret, tls=False, trusting=True)
        else:
            ways["bare"] = Bare(words.nodes, tls=False)
            ways["bare tls"] = Bare(words.nodes, tls=True)
            ways["ps tls"] = MasterAndNodes(words.nodes, secret, tls=True)
        each = words.updates // words.blocks
        taken = in_turn({name: partial(way.run, each) for name, way in ways.items()}, words.blocks)
        for way in ways.values():
            way.close()
        if words.checks:
            show_checks(results, taken, each)
        else:
            show(results, taken, each)


def show_checks(results: Results, taken: dict[str, list[Measured]], each: int) -> None:
    """What of the contributions of a trusting master are left with all checks, in blocks of `each` updates."""
    checked, trusting = taken["ps"], taken["trusting"]
    results.add(
        "{contributions_per_second:.0f} contributions/s with all checks: {share:.3f} of those of a trusting master;"
        "  {work:.3f} times its processor time",
        contributions_per_second=median(each * results.options.nodes / run.seconds for run in checked),
        share=ratios([run.seconds for run in trusting], [run.seconds for run in checked]),
        work=ratios([run.master for run in checked], [run.master for run in trusting]),
    )


def show(results: Results, taken: dict[str, list[Measured]], each: int) -> None:
    """The table of blocks of `each` updates."""
    for name, runs in taken.items():
        bare = "bare tls" if "tls" in name else "bare"
        rate = median(each / run.seconds for run in runs)
        results.add(
            "{way:8} {updates_per_second:7.0f} updates/s  {times_published:6.1f} x published"
            "  {time.median:5.2f} x the time, {work.median:5.2f} x the work of {bare:8}"
            "  {master_us:5.0f} us of the master's processor for a contribution and its answer",
            way=name,
            updates_per_second=rate,
            times_published=rate * PUBLISHED_SECONDS / PUBLISHED_UPDATES,
            bare=bare,
            time=ratios([run.seconds for run in runs], [run.seconds for run in taken[bare]]),
            work=ratios([run.everybody for run in runs], [run.everybody for run in taken[bare]]),
            master_us=1e6 * median(run.master / each / results.options.nodes for run in runs),
        )


if __name__ == "__main__":
    main()
