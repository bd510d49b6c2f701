"""In every round one node in ten is frozen for a while: what waiting for it costs, and what merging without it costs.

    python benchmarks/late_nodes.py [--nodes 10] [--frozen 5] [--epochs 4] [--json]

Nodes without PyTorch train by local steps that sleep, in rounds of about 1.6 s. At the beginning of every round, a node
that is not frozen yet is stopped (SIGSTOP) for some seconds. Goodput is samples per second, compared with a run in
which none is frozen; also after a correction for the time of nodes that were frozen and could do nothing.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

from results import open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from evener.records.event_tail import EVENTS_FILE, EventTail
from evener.records.record import RECORD, Step, TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import Cluster, cluster

TASK = Path(__file__).with_name("late_nodes_task_thin.py")
STEPS = 10
WAYS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "none frozen": (False, ()),
    "waits for all": (True, ()),
    "skips late nodes": (True, ("--skip-late",)),
}
TABLE = (
    "{way:18} {seconds:8.1f} s {goodput:6.0%} {corrected:6.0%} {rounds:7} {skipped:8} {accuracy:9.1%} "
    "{frozen_seconds:7.1f}"
)


class Freezer(threading.Thread):
    """Stops a node at the beginning of every round.

    Args:
        ps: the nodes.
        events: file of events of the run.
        seconds: for which a node is stopped.
    """

    def __init__(self, ps: Cluster, events: Path, seconds: float) -> None:
        super().__init__()
        self._nodes, self._tail, self._seconds = list(ps.nodes.values()), EventTail(events), seconds
        self._draw, self._until = Random(1), dict[subprocess.Popen[bytes], float]()
        self.is_over = False
        self.frozen_seconds = 0.0

    def run(self) -> None:
        while not self.is_over:
            rounds = sum(isinstance(event, Step) for moment in self._tail.read() for event in moment.events)
            self._thaw(time.monotonic())
            running = [node for node in self._nodes if node not in self._until]
            if rounds and running:
                node = self._draw.choice(running)
                node.send_signal(signal.SIGSTOP)
                self._until[node] = time.monotonic() + self._seconds
            time.sleep(0.02)
        self._thaw(float("inf"))

    def _thaw(self, now: float) -> None:
        for node, until in list(self._until.items()):
            if until <= now:
                node.send_signal(signal.SIGCONT)
                self.frozen_seconds += self._seconds - max(0.0, until - time.monotonic())
                del self._until[node]


def train(ps: Cluster, way: str, words: argparse.Namespace) -> tuple[TrainRecord, float]:
    """One run; return its record, and the seconds for which nodes were frozen, together."""
    freezes, options = WAYS[way]
    output = ps.folder / way.replace(" ", "-")
    typed = ("--agreement", "average", "--local-steps", str(STEPS), "--epochs", str(words.epochs), *options)
    training = ps.start_training(str(TASK), *typed, "--output", str(output))
    freezer = Freezer(ps, output / EVENTS_FILE, words.frozen)
    if freezes:
        freezer.start()
    try:
        if training.wait():
            sys.exit(ps.said("train.out"))
    finally:
        freezer.is_over = True
        if freezes:
            freezer.join()
    return read_noun(output / RECORD, TrainRecord), freezer.frozen_seconds


def main() -> None:
    """A row for every way."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=10, help="number of nodes")
    parser.add_argument("--frozen", type=float, default=5.0, help="seconds for which a node is frozen")
    parser.add_argument("--epochs", type=int, default=4, help="of 5 rounds each if there are ten nodes")
    words = parser.parse_args()
    with open_results(words) as results, cluster("--patience", "60") as ps:
        for number in range(words.nodes):
            ps.join(f"node-{number}", "--thin")
        ps.wait_for_nodes()
        results.say(
            f"{'way':18} {'seconds':>10} {'good':>6} {'':>6} {'rounds':>7} {'skipped':>8} {'accuracy':>9} frozen"
        )
        calm = 0.0
        for way in WAYS:
            record, frozen = train(ps, way, words)
            seconds = sum(step.seconds for step in record.steps)
            rate = sum(step.samples for step in record.steps) / seconds
            calm = calm or rate
            results.add(
                TABLE,
                way=way,
                seconds=seconds,
                goodput=rate / calm,
                corrected=rate / calm / (1 - frozen / seconds / words.nodes),
                rounds=len(record.steps),
                skipped=sum(event.kind == "skipped" for event in record.events),
                accuracy=record.validation_accuracy,
                frozen_seconds=frozen,
            )


if __name__ == "__main__":
    main()
