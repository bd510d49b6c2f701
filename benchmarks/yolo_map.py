"""How well a YOLO learns on nodes beside plain `yolo train` of one process: mAP50-95 after equal epochs, by seed.

    python benchmarks/yolo_map.py --data my-data.yaml [--speeds 1,0.5] [--seeds 0,1,2] [--epochs 30] [--json]

The trainings of a seed are pairs: they begin with the same weights, and see the same images in the same batches with
the same random transforms; loop, model, loss and validation of the first one are Ultralytics' own. So all that differs
is how the sums of a batch are rounded. What that alone does is shown by plain `yolo train` twice more, where nothing is
divided: its first weights rounded otherwise, by half a unit of the last digit of single precision; and the images of
every batch in the opposite order, so that the sums of every step are. Training magnifies both likewise.
`--own-order` adds plain `yolo train` with the order and the transforms of its own loader, which is another draw.
`--double` trains all in double precision: smaller roundings, which a hundred and fifty steps magnify likewise; there
batches in the opposite order alone show what rounding does (`yolo_rounding.py`: by step).
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from results import open_results, parser_of
from yolo import PlainRun, ValidatedRun, evener_rank, plain_rank, run_plain, validate_rank

from evener.frontends.yolo.overrides import YoloConfig
from evener.launch.nodes import parse_local_nodes
from evener.launch.ranks import run_local
from evener.records.errors import TrainingFailed

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.yolo_cases import Case, train

SWITCHED_OFF = {"val": False, "plots": False}
WANTED_POINTS = 0.5
"""Of 100, that the means may differ by."""
_PATIENCE = 7200
_METRIC = "metrics/mAP50-95(B)"


def plain_map(
    words: Sequence[str], *, is_paired: bool = True, is_rounded: bool = False, is_backwards: bool = False
) -> float:
    """Of plain `yolo train` in one process."""
    with tempfile.TemporaryDirectory() as folder:
        words = (*words, f"save_dir={folder}/plain")
        config = PlainRun(words, f"{folder}/moments", is_paired, is_rounded, is_backwards)
        run_plain(plain_rank, config)
        return last_map(Path(folder) / "plain0" / "results.csv")


def evener_map(words: Sequence[str], speeds: str) -> float:
    """Through Evener on nodes of some speeds."""
    with tempfile.TemporaryDirectory() as folder:
        config = YoloConfig(overrides=(*words, f"save_dir={folder}/evener"))
        nodes = parse_local_nodes(speeds)
        run_local(evener_rank, nodes, config, patience=_PATIENCE, on_event=lambda _: None, is_elastic=len(nodes) > 1)
        return last_map(Path(folder) / "evener" / "results.csv")


def double_map(words: Sequence[str], shares: str, *, is_backwards: bool = False) -> float:
    """Of processes with such shares of every batch that train in double precision; of one, of plain `yolo train`.

    With the images of every batch in the opposite order, if it `is_backwards`.
    """
    named = dict(word.partition("=")[::2] for word in words)
    model = named.pop("model")
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            key: json.loads(value) if value.isdecimal() else value for key, value in named.items() if value
        }
        ranks = len(shares.split(","))
        case = Case(
            model=model,
            settings=settings | SWITCHED_OFF,
            out=f"{folder}/out",
            shares=shares,
            is_plain=ranks == 1,
            is_backwards=is_backwards,
        )
        train(case, ranks)
        asked = ValidatedRun(f"{folder}/out/run0/weights/last.pt", settings["data"], settings["imgsz"], f"{folder}/map")
        run_plain(validate_rank, asked)
        return 100 * float(Path(asked.output).read_text())


def last_map(results: Path) -> float:
    """mAP50-95 of boxes after the last epoch, in percent. Raises TrainingFailed: there is none."""
    with results.open(newline="") as file:
        rows = [{key.strip(): value for key, value in row.items()} for row in csv.DictReader(file)]
    if not rows or _METRIC not in rows[-1]:
        raise TrainingFailed(f"{results} has no {_METRIC}: train a detector")
    return 100 * float(rows[-1][_METRIC])


def ways_of(speeds: str, *, own_order: bool) -> dict[str, Callable[[Sequence[str]], float]]:
    """What is trained with every seed, that with which the others are compared first."""
    ways: dict[str, Callable[[Sequence[str]], float]] = {
        "yolo train": plain_map,
        "weights rounded otherwise": partial(plain_map, is_rounded=True),
        "its batches backwards": partial(plain_map, is_backwards=True),
        f"nodes {speeds}": partial(evener_map, speeds=speeds),
    }
    if own_order:
        ways["its own order"] = partial(plain_map, is_paired=False)
    return ways


def ways_in_double_precision(speeds: str) -> dict[str, Callable[[Sequence[str]], float]]:
    """Likewise; nodes have shares as `speeds` are, and are not slowed down."""
    return {
        "yolo train": partial(double_map, shares="1"),
        "its batches backwards": partial(double_map, shares="1", is_backwards=True),
        f"nodes {speeds}": partial(double_map, shares=speeds),
    }


def main() -> None:
    """Train all ways with every seed, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--nbs", type=int, default=16, help="images of a step, which is as many batches as that takes")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--speeds", default="1,0.5")
    parser.add_argument("--own-order", action="store_true", help="also with the order of its own loader")
    parser.add_argument("--double", action="store_true", help="train in double precision")
    parser.add_argument("--words", nargs="+", default=[], help="more of `yolo train`, as mosaic=0")
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"nbs={asked.nbs}", f"epochs={asked.epochs}", "val=False", "plots=False", "cache=ram", *asked.words]
    ways = ways_in_double_precision(asked.speeds) if asked.double else ways_of(asked.speeds, own_order=asked.own_order)
    found: dict[str, list[float]] = {way: [] for way in ways}
    with open_results(asked) as results:
        for seed in asked.seeds.split(","):
            for way, map_of in ways.items():
                found[way].append(map_of([*words, f"seed={seed}"]))
                results.add("seed {seed}: {map:6.2f} %  {way}", seed=seed, way=way, map=found[way][-1])
        first, *others = found
        for way in others:
            pairs = [other - own for own, other in zip(found[first], found[way], strict=True)]
            results.add(
                "{way}: {points:+.2f} ± {error:.2f} points beside yolo train, wanted within {wanted}",
                way=way,
                points=mean(pairs),
                error=stdev(pairs) / sqrt(len(pairs)) if len(pairs) > 1 else 0.0,
                wanted=WANTED_POINTS,
                pairs=pairs,
            )


if __name__ == "__main__":
    import_module("yolo_map").main()  # ranks import what is defined here
