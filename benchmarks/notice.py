"""Nodes leave on notice and come back, every few seconds: is anything lost, or done again, and what does it cost?

    python benchmarks/notice.py [--seconds 600] [--every 15] [--away 5] [--ways ranks,sync,async] [--json]

Three nodes of a master train; every so many seconds the next of them gets a SIGTERM, as from Slurm or Kubernetes, and
joins again some seconds later. Weights are compared with those of one process, in float64. Nodes idle instead of
computing, so that three of them fit on two cores.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from argparse import Namespace
from collections import defaultdict
from itertools import cycle
from pathlib import Path

from results import Results, open_results, parser_of
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.command_cluster import Cluster, cluster, wait_until

TASK = Path(__file__).with_name("elastic_task.py")
SAMPLES = 400
NODES = ("one", "two", "three")
WAYS = {
    "ranks": ("--strategy", "data", "--shares", "1,1,1"),
    "sync": ("--agreement", "sync", "--option", "norm=false"),
    "async": ("--agreement", "async", "--option", "norm=false"),
}
_END_SECONDS = 60.0
_STEP_SECONDS = 0.030
_TRIAL_EPOCHS = 20


def disturbed(ps: Cluster, way: str, epochs: int, words: Namespace) -> tuple[TrainRecord, int, int]:
    """Train while nodes leave and come back; return the record, the notices, and the nodes that ended in disorder."""
    output = ps.folder / way
    typed = (*options(way, epochs), "--option", f"pause={_STEP_SECONDS}", "--output", str(output))
    training = ps.start_training(str(TASK), *typed)
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
        node = ps.nodes[name]
        node.send_signal(signal.SIGTERM)
        node.wait(_END_SECONDS)
        disorderly += ps.state(name) != "left"
        time.sleep(words.away)
        ps.join(name)
    if training.wait():
        sys.exit(ps.said("train.out"))
    return read_noun(output / "record.json", TrainRecord), notices, disorderly


def epoch_seconds(ps: Cluster, way: str) -> float:
    """Train some epochs in peace; return the seconds of one, without the start of a run."""
    output = ps.folder / f"{way}-peace"
    typed = (*options(way, _TRIAL_EPOCHS), "--option", f"pause={_STEP_SECONDS}", "--output", str(output))
    if ps.start_training(str(TASK), *typed).wait():
        sys.exit(ps.said("train.out"))
    seconds = defaultdict[int, float](float)
    for step in read_noun(output / "record.json", TrainRecord).steps:
        seconds[step.epoch] += step.seconds
    return statistics.median(seconds.values())


def options(way: str, epochs: int, *, is_alone: bool = False) -> tuple[str, ...]:
    """Options of the run on nodes, or of that on one process alone."""
    own = () if way == "ranks" and is_alone else WAYS[way][2 * is_alone :]
    return (*own, "--epochs", str(epochs), "--precision", "fp64", "--option", f"samples={SAMPLES}")


def measure(results: Results, ps: Cluster, way: str, words: Namespace) -> None:
    """Add the row of one way."""
    epochs = max(1, round(words.seconds / epoch_seconds(ps, way)))
    record, notices, disorderly = disturbed(ps, way, epochs, words)
    typed = ("train", str(TASK), *options(way, epochs, is_alone=True), "--local-nodes", "1", "--output", f"{way}-alone")
    trained = ps.evener(*typed, timeout=10 * words.seconds + _END_SECONDS)
    if trained.returncode:
        sys.exit(trained.stderr)
    first, second = (load_file(ps.folder / name / "model.safetensors") for name in (f"{way}-alone", way))
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
    parser.add_argument("--ways", default="ranks,sync")
    words = parser.parse_args()
    with open_results(words) as results, cluster("--patience", "6") as ps:
        for name in NODES:
            ps.join(name)
        ps.wait_for_nodes()
        for way in words.ways.split(","):
            measure(results, ps, way, words)
        ps.down()


if __name__ == "__main__":
    main()
