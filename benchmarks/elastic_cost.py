"""What it costs a step that the run could go on without a node: --elastic against --no-elastic, nobody is lost.

    python benchmarks/elastic_cost.py [--nodes 1,1] [--strategy data] [--rounds 40] [--seconds 2] [--width 32] [--json]

Both runs are started as a user types them, and take turns: while one computes, all processes of the other are stopped.
So whatever else the machine does meets both, and beats and threads are counted in the run that has them. Told is how
long a step takes with --elastic over without, round by round.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from results import open_results, parser_of
from turns import in_turn, ratios, spread

TASK = Path(__file__).with_name("elastic_cost_task.py")
_WAYS = {"elastic": "--elastic", "fixed": "--no-elastic"}
_WARM_UP = 3
_LEAST_STEPS = 10
_LOOK = 0.05
"""Seconds."""


def main() -> None:
    """Both runs side by side, in turn."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="1,1", help="speeds of the local nodes")
    parser.add_argument("--strategy", default="data", help="data, or how the model is divided")
    parser.add_argument("--replicas", help="nodes of each, where the model is divided in several")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run in each round")
    parser.add_argument("--width", type=int, default=32, help="channels of the model")
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory() as place:
        with stopped(Path(place) / "elastic", words) as elastic, stopped(Path(place) / "fixed", words) as fixed:
            ways = {"elastic": lambda: elastic.step_seconds(words.seconds)}
            ways["fixed"] = lambda: fixed.step_seconds(words.seconds)
            found = in_turn(ways, words.rounds, warm_up=_WARM_UP)
        for way, seconds in found.items():
            results.add("{way:8} {ms:.2f} ms a step", way=way, ms=spread(1000 * one for one in seconds))
        ratio = ratios(found["elastic"], found["fixed"])
        results.add(
            "a step takes {ratio:.4f} times as long with --elastic",
            ratio=ratio,
            median=ratio.median,
            least=ratio.least,
            most=ratio.most,
            rounds=words.rounds,
        )


class StoppedRun:
    """A run whose processes all stand still but while its steps are counted.

    Args:
        process: that was started, of a session of its own.
        counts: folder in which each of its ranks counts its steps.
    """

    def __init__(self, process: subprocess.Popen[bytes], counts: Path) -> None:
        self._process, self._counts = process, counts

    def await_steps(self, number: int) -> None:
        """Let it run until it has done so many steps, then stop it. Raises RuntimeError: it has ended."""
        while self._steps() < number:
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended with exit code {self._process.returncode}")
            time.sleep(_LOOK)
        os.killpg(self._process.pid, signal.SIGSTOP)

    def step_seconds(self, seconds: float) -> float:
        """Of a step, while the run computes for so long, or longer on a machine that is busy with other things."""
        os.killpg(self._process.pid, signal.SIGCONT)
        begin, before = time.perf_counter(), self._steps()
        time.sleep(seconds)
        while (after := self._steps()) < before + _LEAST_STEPS:
            time.sleep(_LOOK)
        end = time.perf_counter()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return (end - begin) / (after - before)

    def _steps(self) -> int:
        return max((file.stat().st_size for file in self._counts.iterdir()), default=0)


@contextmanager
def stopped(folder: Path, words: Namespace) -> Iterator[StoppedRun]:
    """A run into `folder` that has done its first steps and stands still; ended with the block."""
    counts = folder / "counts"
    counts.mkdir(parents=True)
    options = ["--option", f"counts={counts}", "--option", f"width={words.width}"]
    nodes = ["--local-nodes", words.nodes, "--strategy", words.strategy, "--patience", "60"]
    if words.strategy == "data":
        nodes += ["--shares", words.nodes]
    if words.replicas:
        nodes += ["--replicas", words.replicas]
    command = [sys.executable, "-m", "evener", "train", str(TASK), *options, *nodes, _WAYS[folder.name]]
    process = subprocess.Popen(
        [*command, "--output", str(folder / "run")], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        run = StoppedRun(process, counts)
        run.await_steps(50)
        yield run
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
