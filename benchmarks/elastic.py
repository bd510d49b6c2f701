"""A storm over a run: processes are killed and frozen, others come in their place; is the model that of one process?

    python benchmarks/elastic.py [--nodes 1,0.5,0.25,0.25] [--epochs 100] [--every 1] [--frozen 0.25] [--json]

About every so many seconds a process of the run is killed (kill -9) or, with this probability, frozen for half to
twice the patience. Weights and running statistics afterwards are compared with those that one process trains, in
float64. Told are seconds from the moment that a loss was known until the others computed again, and what was lost.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
from results import Results, open_results, parser_of
from safetensors.torch import load_file

from evener.record import TrainRecord
from evener.schema import read_noun

TASK = Path(__file__).with_name("elastic_task.py")
_GO_ON = re.compile(r"; (\d+) nodes? of \d+ go on")
_MARGIN = 2.0
"""Seconds, besides the patience, after which the victim was not yet a rank, if the run does not speak of its loss."""
_KNOWN = re.compile(r"([\d.]+) s after that was known; ([\d.]+) s lost")


def main() -> None:
    """One storm, one calm run on one process, and how they differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="1,0.5,0.25,0.25", help="speeds of the local nodes")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between faults, in the mean")
    parser.add_argument("--frozen", type=float, default=0.25, help="probability that a fault is a freeze")
    parser.add_argument("--patience", type=float, default=2.0)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds that a step takes longer")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory() as folder:
        calm, stormy = Path(folder) / "calm", Path(folder) / "stormy"
        subprocess.run(command(calm, words.epochs, 0.0), check=True, stdout=subprocess.DEVNULL)
        shares = ",".join(words.nodes.split(","))
        more = ["--elastic", "--local-nodes", words.nodes, "--shares", shares, "--patience", str(words.patience)]
        said = Path(folder) / "said"
        with said.open("w") as out:
            run = subprocess.Popen(command(stormy, words.epochs, words.pause, *more), stdout=out)
        storm = Storm(run, said, len(words.nodes.split(",")), words.seed, words.every, words.frozen, words.patience)
        storm.rage()
        show(results, calm, stormy, storm)


def command(output: Path, epochs: int, pause: float, *more: str) -> list[str]:
    """The words that train the task."""
    words = ["train", str(TASK), "--option", f"pause={pause}", "--epochs", str(epochs), "--precision", "fp64"]
    return [sys.executable, "-m", "evener", *words, "--output", str(output), *more]


class Storm:
    """Kills and freezes processes of one run while it goes on.

    Whoever goes on is let alone while he is the only one.

    Args:
        run: whose processes suffer.
        said: file with what it says.
        nodes: of the run.
        seed: decides who suffers what, and when.
        every: seconds between faults, in the mean.
        frozen: probability that a fault is a freeze.
        patience: of the run.

    Attributes:
        done: how often each kind of fault was made.
    """

    def __init__(
        self,
        run: subprocess.Popen[bytes],
        said: Path,
        nodes: int,
        seed: int,
        every: float,
        frozen: float,
        patience: float,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._run, self._said, self._nodes, self._random = run, said, nodes, random.Random(seed)
        self._every, self._frozen, self._patience = every, frozen, patience
        self._sleepers: list[tuple[float, psutil.Process]] = []
        self._untold: list[tuple[float, int]] = []

    def rage(self) -> None:
        """Until the run is over. Raises CalledProcessError: it failed."""
        due = time.monotonic()
        while self._run.poll() is None:
            time.sleep(0.01)
            self._wake(time.monotonic())
            if time.monotonic() >= due and self._remaining() > 1 and not self._untold:
                due = time.monotonic() + self._every * self._random.uniform(0.1, 1.9)
                self._strike()
        self._wake(float("inf"))
        if self._run.returncode:
            raise subprocess.CalledProcessError(self._run.returncode, "evener train")

    def _remaining(self) -> int:
        """Nodes that surely go on, if nobody was killed since the run last said how many do."""
        said = self._said.read_text().replace("\n", " ")
        told, now = _GO_ON.findall(said), time.monotonic()
        self._untold = [(when, before) for when, before in self._untold if now < when and before == len(told)]
        going_on = int(told[-1]) if told else self._nodes if "epoch 1" in said else 0
        return going_on - len(self._sleepers)

    def _strike(self) -> None:
        frozen = {process.pid for _, process in self._sleepers}
        awake = [process for process in ranks_of(self._run.pid) if process.pid not in frozen]
        if len(awake) < 2:  # somebody has to go on
            return
        victim, is_frozen = self._random.choice(awake), self._random.random() < self._frozen
        try:
            victim.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self.done["frozen" if is_frozen else "killed"] += 1
        if not is_frozen:
            told = len(_GO_ON.findall(self._said.read_text().replace("\n", " ")))
            self._untold.append((time.monotonic() + self._patience + _MARGIN, told))
        if is_frozen:
            seconds = self._patience * self._random.uniform(0.5, 2.0)
            self._sleepers.append((time.monotonic() + seconds, victim))

    def _wake(self, now: float) -> None:
        for when, process in self._sleepers:
            if when <= now and process.is_running():
                process.send_signal(signal.SIGCONT)
        self._sleepers = [(when, process) for when, process in self._sleepers if when > now and process.is_running()]


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes that stand for the nodes of the run `pid`."""
    servers = [child for child in psutil.Process(pid).children() if "forkserver" in " ".join(child.cmdline())]
    found = [rank for server in servers for rank in server.children()]
    return sorted((rank for rank in found if rank.status() != psutil.STATUS_ZOMBIE), key=lambda rank: rank.pid)


def show(results: Results, calm: Path, stormy: Path, storm: Storm) -> None:
    """How the two runs differ, and what the faults cost."""
    record = read_noun(stormy / "record.json", TrainRecord)
    one, other = (load_file(folder / "model.safetensors") for folder in (calm, stormy))
    off = max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
    lost = [event for event in record.events if event.kind == "node lost"]
    told = [tuple(map(float, match.groups())) for e in lost if (match := _KNOWN.search(e.message))]
    steps = sum(1 for _ in record.steps) * record.every
    results.add(
        "{killed} killed, {frozen} frozen in {seconds:.0f} s; {generations} times ranks were lost, {joined} times came",
        killed=storm.done["killed"],
        frozen=storm.done["frozen"],
        seconds=record.seconds,
        generations=len(lost),
        joined=sum(event.kind == "joined" for event in record.events),
    )
    results.add("weights are off by {off:.1e} at most after {steps} steps", off=off, steps=steps)
    if told:
        known, all_lost = [one for one, _ in told], [other for _, other in told]
        results.add(
            "computing again {middle:.3f} s after a loss was known (median), {worst:.3f} s at most",
            middle=median(known),
            worst=max(known),
        )
        results.add(
            "{middle:.2f} s lost by a loss (median), {all:.1f} s in all; goodput {goodput:.1%}",
            middle=median(all_lost),
            all=sum(all_lost),
            goodput=record.goodput,
        )


if __name__ == "__main__":
    main()
