"""YOLO through Evener beside plain `yolo train`: one node, nodes of unequal speed, two equal ones; in turn.

    python benchmarks/yolo.py --data my-data.yaml [--model yolov8n.yaml] [--imgsz 160] [--rounds 3] [--json]

Every node is a process on a core of its own, with one thread. A node of speed 0.5 idles as long as it computes, so
plain `yolo train` on it would be half as fast as on the other one. Seconds are those of batches after the first epoch,
loading included, validation not; figures are medians over the rounds of ratios within a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from results import open_results, parser_of
from turns import in_turn, ratios

from evener.events import RunEvent
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.record import TrainRecord
from evener.yolo.rank import alone, yolo_rank
from evener.yolo.words import YoloConfig

WAYS = {"one node": "1", "unequal nodes": "1,0.5", "equal nodes": "1,1"}
"""What is compared with plain `yolo train`: speeds of nodes."""
WANTED = {"one node": 0.97, "unequal nodes": 0.9, "equal nodes": 0.9}


class PlainRun(msgspec.Struct, frozen=True):
    """Plain `yolo train`, of some words, that writes the moments of its batches into a file."""

    words: tuple[str, ...]
    output: str


def _quiet() -> contextlib.redirect_stdout[Any]:
    """Inside, nothing is printed; torchvision can be imported where its own operators do not load."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import torchvision_operators  # noqa: F401

    return contextlib.redirect_stdout(open(os.devnull, "w"))


def plain_rank(_: RankEnvironment, config: PlainRun) -> None:
    """What a process of plain `yolo train` runs."""
    moments: list[tuple[int, float]] = []

    def note(trainer: Any) -> None:
        moments.append((trainer.epoch, time.perf_counter()))

    with _quiet(), alone():
        from evener.yolo.settings import read_training

        model, settings, _folder = read_training(config.words)
        model.add_callback("on_train_epoch_start", note)
        model.add_callback("on_train_batch_end", note)
        model.train(**settings, device="cpu")
    Path(config.output).write_text(json.dumps(moments))


def evener_rank(env: RankEnvironment, config: YoloConfig) -> None:
    """What a node runs."""
    with _quiet():
        yolo_rank(env, config)


def plain_seconds(words: Sequence[str], batches: int) -> float:
    """Of a batch of plain `yolo train` on one node, the median of the epochs after the first."""
    with tempfile.TemporaryDirectory() as folder:
        moments_file = Path(folder) / "moments.json"
        config = PlainRun((*words, f"save_dir={folder}/plain"), str(moments_file))
        run_local(plain_rank, parse_local_nodes("1"), config, patience=120, on_event=lambda _: None)
        moments = [(epoch, moment) for epoch, moment in json.loads(moments_file.read_text()) if epoch > 0]
    rows = [[moment for epoch, moment in moments if epoch == one] for one in {epoch for epoch, _ in moments}]
    return float(median((row[-1] - row[0]) / batches for row in rows))


def evener_seconds(words: Sequence[str], speeds: str, batches: int) -> float:
    """Of a batch through Evener on nodes of some speeds, likewise."""
    records: list[TrainRecord] = []

    def keep(event: RunEvent) -> None:
        if isinstance(event, TrainRecord):
            records.append(event)

    with tempfile.TemporaryDirectory() as folder:
        config = YoloConfig(words=(*words, f"save_dir={folder}/evener"))
        run_local(evener_rank, parse_local_nodes(speeds), config, patience=120, on_event=keep)
    steps = [step for step in records[0].steps if step.epoch > 0]
    return median(sum(s.seconds for s in steps if s.epoch == one) / batches for one in {s.epoch for s in steps})


def main() -> None:
    """Run the rounds and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--batch", type=int, default=13)
    parser.add_argument("--batches", type=int, default=2, help="of an epoch of the data")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"epochs={asked.epochs}", "val=False", "plots=False", "close_mosaic=0"]
    with open_results(asked) as results:
        ways = {way: partial(evener_seconds, words, speeds, asked.batches) for way, speeds in WAYS.items()}
        found = in_turn({"plain": partial(plain_seconds, words, asked.batches), **ways}, asked.rounds, warm_up=0)
        for way, speeds in WAYS.items():
            ideal = sum(node.speed_at(0) for node in parse_local_nodes(speeds))
            of_sum = ratios(found["plain"], [seconds * ideal for seconds in found[way]])
            results.add(
                "{way} ({speeds}): {of_sum:.1%} of the sum of the speeds of plain YOLO; wanted {wanted:.0%}",
                way=way,
                speeds=speeds,
                of_sum=of_sum,
                wanted=WANTED[way],
                seconds=found[way],
                plain_seconds=found["plain"],
            )


if __name__ == "__main__":
    main()
