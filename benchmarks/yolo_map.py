"""How well a YOLO learns through Evener beside plain `yolo train`: mAP50-95 after equal epochs, by seed.

    python benchmarks/yolo_map.py --data my-data.yaml [--speeds 1,0.5] [--seeds 0,1,2] [--epochs 30] [--json]

Both begin with the weights of the seed; the order of images and what is drawn for them are drawn otherwise, so equal
seeds are no more alike than two seeds of plain `yolo train` are. What counts is the difference of the means, beside how
far the seeds of plain `yolo train` lie apart.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from results import open_results, parser_of

from evener.errors import TrainingFailed
from evener.launch.nodes import parse_local_nodes
from evener.launch.ranks import run_local
from evener.yolo.words import YoloConfig
from yolo import PlainRun, evener_rank, plain_rank

WANTED_POINTS = 0.5
"""Of 100, that the means may differ by."""
_PATIENCE = 300
_METRIC = "metrics/mAP50-95(B)"


def plain_map(words: Sequence[str]) -> float:
    """Of plain `yolo train` on one node."""
    with tempfile.TemporaryDirectory() as folder:
        config = PlainRun((*words, f"save_dir={folder}/plain"), f"{folder}/moments.json")
        run_local(plain_rank, parse_local_nodes("1"), config, patience=_PATIENCE, on_event=lambda _: None)
        return last_map(Path(folder) / "plain" / "results.csv")


def evener_map(words: Sequence[str], speeds: str) -> float:
    """Through Evener on nodes of some speeds."""
    with tempfile.TemporaryDirectory() as folder:
        config = YoloConfig(words=(*words, f"save_dir={folder}/evener"))
        run_local(evener_rank, parse_local_nodes(speeds), config, patience=_PATIENCE, on_event=lambda _: None)
        return last_map(Path(folder) / "evener" / "results.csv")


def last_map(results: Path) -> float:
    """mAP50-95 of boxes after the last epoch, in percent. Raises TrainingFailed: there is none."""
    with results.open(newline="") as file:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(file)]
    if not rows or _METRIC not in rows[-1]:
        raise TrainingFailed(f"{results} has no {_METRIC}: train a detector")
    return 100 * float(rows[-1][_METRIC])


def main() -> None:
    """Train both ways with every seed, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--speeds", default="1,0.5")
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"epochs={asked.epochs}", "val=False", "plots=False"]
    found: dict[str, list[float]] = {"plain": [], "evener": []}
    with open_results(asked) as results:
        for seed in asked.seeds.split(","):
            found["plain"].append(plain_map([*words, f"seed={seed}"]))
            found["evener"].append(evener_map([*words, f"seed={seed}"], asked.speeds))
            line = "seed {seed}: {plain:.2f} % by yolo train, {evener:.2f} % on nodes {speeds}"
            results.add(line, seed=seed, plain=found["plain"][-1], evener=found["evener"][-1], speeds=asked.speeds)
        results.add(
            "difference of the means {points:+.2f} points, wanted within {wanted}; seeds of yolo train: ±{spread:.2f}",
            points=mean(found["evener"]) - mean(found["plain"]),
            wanted=WANTED_POINTS,
            spread=stdev(found["plain"]) if len(found["plain"]) > 1 else 0.0,
        )


if __name__ == "__main__":
    main()
