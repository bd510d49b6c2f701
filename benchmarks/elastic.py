"""A storm over a run: processes are killed and frozen, others come in their place; is the model that of one process?

    python benchmarks/elastic.py [--nodes 1,0.5,0.25,0.25] [--epochs 100] [--apart 1,3] [--frozen 0.25] [--json]

So many seconds after the last one, a process of the run is killed (kill -9) or, with this probability, frozen for half
to twice the patience; after so many `--faults`, or `--seconds`, the run ends with its epoch. Weights and running
statistics afterwards are compared with those that one process trains, in float64. Told are seconds from the moment that
a loss was known until the others computed again, what was lost, who was lost without having been struck (nobody, it
should be), and how fast the run was beside a calm one of the same nodes.

    --apart 1,4 --faults 640 --epochs 3000          1200 kills, freezes and joins: half an hour or more
    --apart 1,4 --faults 200 --frozen 1 --epochs 3000
    --apart 15,15 --frozen 0 --seconds 600 --epochs 3000 --pause 0.05      what goes on while one is killed every 15 s
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median

from elastic_storm import Storm, Weather
from results import Results, open_results, parser_of
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun

_KNOWN = re.compile(r"([\d.]+) s after that was known; ([\d.]+) s lost")
_LONG = 0.5
"""Seconds until nodes compute again that are too many."""
_CALM_EPOCHS = 10
"""Of the run whose speed the storm's is compared with."""


def main() -> None:
    """One storm, one calm run on one process and one on the same nodes, and how they differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="1,0.5,0.25,0.25", help="speeds of the local nodes")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--apart", default="1,3", help="least and most seconds between faults")
    parser.add_argument("--faults", type=int, default=0, help="so many, then the run ends; 0: it ends by itself")
    parser.add_argument("--seconds", type=float, default=0, help="so long, then the run ends; 0: it ends by itself")
    parser.add_argument("--frozen", type=float, default=0.25, help="probability that a fault is a freeze")
    parser.add_argument("--patience", type=float, default=2.0)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds that a step takes longer")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        alone, calm, stormy = (folder / name for name in ("alone", "calm", "stormy"))
        nodes = ["--nodes", words.nodes, "--patience", str(words.patience), "--pause", str(words.pause)]
        subprocess.run(command(calm, _CALM_EPOCHS, *nodes), check=True, stdout=subprocess.DEVNULL)
        storm = storm_over(stormy, folder, words, nodes)
        record = read_noun(stormy / "record.json", TrainRecord)
        last = ["--last", str(record.steps[-1].epoch)]
        subprocess.run(command(alone, words.epochs, *last), check=True, stdout=subprocess.DEVNULL)
        show_faults(results, storm, record)
        show_model(results, alone, stormy)
        show_speed(results, read_noun(calm / "record.json", TrainRecord), record)


def command(output: Path, epochs: int, *more: str) -> list[str]:
    """The words that train the task."""
    return [sys.executable, str(Path(__file__).with_name("elastic_run_script.py")), str(output), str(epochs), *more]


def storm_over(stormy: Path, folder: Path, words: Namespace, nodes: list[str]) -> Storm:
    """The storm, when the run into `stormy` that it raged over has ended."""
    low, high = map(float, words.apart.split(","))
    weather = Weather(
        seed=words.seed,
        apart=(low, high),
        frozen=words.frozen,
        faults=words.faults,
        patience=words.patience,
        seconds=words.seconds,
    )
    said, over = folder / "said", folder / "over"
    with said.open("w") as out:
        run = subprocess.Popen(command(stormy, words.epochs, *nodes, "--over", str(over)), stdout=out)
    storm = Storm(run, said, len(words.nodes.split(",")), weather)
    storm.rage(on_over=over.touch)
    return storm


def show_faults(results: Results, storm: Storm, record: TrainRecord) -> None:
    """What was done to the run, what it noticed, and whether it gave up anybody to whom nothing was done."""
    told = " ".join(event.message for event in record.events if event.kind in ("node lost", "joined"))
    killed, silent = told.count(" was killed by signal 9"), told.count(" has been silent for ")
    joined = told.count(" came")
    results.add(
        "{killed} killed, {frozen} frozen, {joined} joined: {all} in {seconds:.0f} s, seed {seed}",
        killed=storm.done["killed"],
        frozen=storm.done["frozen"],
        joined=joined,
        all=storm.done.total() + joined,
        seconds=storm.seconds,
        seed=results.options.seed,
    )
    results.add(
        "{gone} processes given up: {killed} that were killed, {silent} that were silent",
        gone=killed + silent,
        killed=killed,
        silent=silent,
        unstruck=max(0, killed - storm.done["killed"]) + max(0, silent - storm.done["frozen"]),
    )
    results.say(f"{results.rows[-1]['unstruck']} of them had not been struck")


def show_model(results: Results, alone: Path, stormy: Path) -> None:
    """How far weights and running statistics are off those of one process, and whether each sample was used once."""
    one, other = (load_file(folder / "model.safetensors") for folder in (alone, stormy))
    calm, record = (read_noun(folder / "record.json", TrainRecord) for folder in (alone, stormy))
    results.add(
        "weights are off by {off:.1e} at most after {steps} steps, of {samples} samples as on one process: {alike}",
        off=max(float((one[name].double() - other[name].double()).abs().max()) for name in one),
        steps=record.steps[-1].step,
        samples=sum(step.samples for step in record.steps),
        alike=sum(step.samples for step in record.steps) == sum(step.samples for step in calm.steps),
    )


def show_speed(results: Results, calm: TrainRecord, record: TrainRecord) -> None:
    """What the faults cost."""
    lost = [event for event in record.events if event.kind == "node lost"]
    told = [tuple(map(float, match.groups())) for e in lost if (match := _KNOWN.search(e.message))]
    if told:
        known, all_lost = [one for one, _ in told], [other for _, other in told]
        results.add(
            "computing again {middle:.3f} s after a loss was known (median of {losses}), {worst:.3f} s at most, "
            "{late} times later than {long} s",
            middle=median(known),
            losses=len(known),
            worst=max(known),
            late=sum(one > _LONG for one in known),
            long=_LONG,
        )
        results.add("{middle:.2f} s lost by a loss (median)", middle=median(all_lost), all=sum(all_lost))
    own, other = (one.steps[-1].step / one.seconds for one in (record, calm))
    results.add(
        "goodput {goodput:.1%}; {speed:.1%} of the steps a second of a calm run of all the nodes",
        goodput=record.goodput,
        speed=own / other,
    )


if __name__ == "__main__":
    main()
