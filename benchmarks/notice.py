"""Nodes leave on notice and come back, every few seconds: is anything lost, or done again, and what does it cost?

    python benchmarks/notice.py [--seconds 600] [--every 15] [--away 5] [--ways ranks,sync,async] [--json]

Three nodes of a master train; every so many seconds the next of them gets a SIGTERM, as from Slurm or Kubernetes, and
joins again some seconds later. Weights are compared with those of one process, in float64. Nodes idle instead of
computing, so that three of them fit on two cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from elastic_task import data
from results import Results, open_results, parser_of
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun

TASK = Path(__file__).with_name("elastic_task.py")
SAMPLES = 400
NODES = ("one", "two", "three")
WAYS = {
    "ranks": ("--strategy", "data", "--shares", "1,1,1"),
    "sync": ("--agreement", "sync", "--option", "norm=false"),
    "async": ("--agreement", "async", "--option", "norm=false"),
}
_WAIT = 60.0
_STEP_SECONDS = 0.030


class Cluster:
    """A master and its nodes, as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        words = ("--listen", "127.0.0.1:0", "--home", str(self.home), "--patience", "6")
        self.master = self.start("up", "--json", *words, reads=True)
        assert self.master.stdout is not None
        said = json.loads(self.master.stdout.readline())
        self.address, self.token = said["address"], said["token"]

    def start(self, *words: str, reads: bool = False) -> subprocess.Popen[str]:
        """Start a command of Evener; `reads` if its output is read."""
        with (self.folder / "log").open("a") as log:
            typed, out = [sys.executable, "-m", "evener", *words], subprocess.PIPE if reads else log
            return subprocess.Popen(typed, stdout=out, stderr=log, text=True, cwd=self.folder)

    def join(self, name: str) -> None:
        """Start a node."""
        cache = str(self.folder / f"cache-{name}")
        words = ("--name", name, "--device", "cpu", "--cache", cache, "--token", self.token)
        self.processes[name] = self.start("join", self.address, *words)

    def nodes(self) -> dict[str, str]:
        """State of the nodes that have measured their device."""
        asked = self.start("nodes", "--json", "--home", str(self.home), reads=True)
        out, _ = asked.communicate(timeout=_WAIT)
        return {node["name"]: node["state"] for node in json.loads(out)["nodes"] if node["score"] is not None}

    def close(self) -> None:
        """End everything."""
        self.start("down", "--home", str(self.home)).wait(_WAIT)
        for process in (*self.processes.values(), self.master):
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    until = time.monotonic() + _WAIT
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not happen within {_WAIT:g} s")
        time.sleep(0.2)


def disturbed(cluster: Cluster, way: str, epochs: int, words: Namespace) -> tuple[TrainRecord, int, int]:
    """Train while nodes leave and come back; return the record, the notices, and the nodes that ended in disorder."""
    output = cluster.folder / way
    typed = (*options(way, epochs), "--option", f"pause={_STEP_SECONDS}", "--home", str(cluster.home))
    training = cluster.start("train", str(TASK), *typed, "--output", str(output))
    events = output / "events.jsonl"
    wait_until(lambda: training.poll() is not None or (events.exists() and events.stat().st_size > 3000), "a step")
    notices = disorderly = 0
    end = time.monotonic() + words.seconds
    for name in cycle(NODES):
        notice = time.monotonic() + words.every - words.away
        while training.poll() is None and time.monotonic() < notice:
            time.sleep(0.1)
        if training.poll() is not None or time.monotonic() > end:
            break
        notices += 1
        node = cluster.processes[name]
        node.send_signal(signal.SIGTERM)
        node.wait(_WAIT)
        disorderly += cluster.nodes().get(name) != "left"
        time.sleep(words.away)
        cluster.join(name)
    training.wait()
    if training.returncode:
        sys.exit((cluster.folder / "log").read_text()[-3000:])
    return read_noun(output / "record.json", TrainRecord), notices, disorderly


def options(way: str, epochs: int, *, is_alone: bool = False) -> tuple[str, ...]:
    """Options of the run on nodes, or of that on one process alone."""
    own = () if way == "ranks" and is_alone else WAYS[way][2 * is_alone :]
    return (*own, "--epochs", str(epochs), "--precision", "fp64", "--option", f"samples={SAMPLES}")


def measure(results: Results, cluster: Cluster, way: str, words: Namespace) -> None:
    """Add the row of one way."""
    epochs = round(words.seconds / (len(data(SAMPLES, 1)) / 20 * words.step))
    record, notices, disorderly = disturbed(cluster, way, epochs, words)
    alone = cluster.folder / f"{way}-alone"
    typed = ("train", str(TASK), *options(way, epochs, is_alone=True), "--local-nodes", "1", "--output", str(alone))
    if cluster.start(*typed).wait():
        sys.exit((cluster.folder / "log").read_text()[-3000:])
    first, second = (load_file(folder / "model.safetensors") for folder in (alone, cluster.folder / way))
    bad = ("node lost", "skipped", "excluded", "left out", "refused", "begins again")
    results.add(
        "{way}: {notices} notices in {seconds:.0f} s; {disorderly} without an orderly end, {lost} events of loss, "
        "{late} late contributions; {samples} of {wanted} samples; goodput {goodput:.2%}; weights differ by {off:.1e}",
        way=way,
        notices=notices,
        seconds=record.seconds,
        disorderly=disorderly,
        lost=sum(event.kind in bad for event in record.events),
        repeated=sum("done again" in event.message for event in record.events),
        late=sum(node.late + node.refused for node in record.nodes),
        samples=sum(step.samples for step in record.steps),
        wanted=epochs * SAMPLES,
        goodput=record.goodput,
        off=max(float((first[name].double() - second[name].double()).abs().max()) for name in first),
        kinds=sorted({event.kind for event in record.events}),
    )


def main() -> None:
    """A row for each way."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run, about")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two notices")
    parser.add_argument("--away", type=float, default=5.0, help="seconds until a node that has left joins again")
    parser.add_argument("--step", type=float, default=0.040, help="seconds of a step, to choose the number of epochs")
    parser.add_argument("--ways", default="ranks,sync")
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory(prefix="evener-") as folder:
        cluster = Cluster(Path(folder))
        try:
            for name in NODES:
                cluster.join(name)
            wait_until(lambda: len(cluster.nodes()) == len(NODES), "that all nodes join")
            for way in words.ways.split(","):
                measure(results, cluster, way, words)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
