"""YOLO through Evener beside plain `yolo train`: one node, nodes of unequal speed, two equal ones; in turn.

    python benchmarks/yolo.py --data my-data.yaml [--model yolov8n.yaml] [--imgsz 160] [--rounds 3] [--json]

Every node is a process on a core of its own, with one thread. A node of speed 0.5 idles as long as it computes, so
plain `yolo train` on it would be half as fast as on the other one. Seconds are those of batches after the first epoch,
loading included, validation not; figures are medians over the rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torchvision_operators  # noqa: F401  (registers the operators before torchvision is imported)
from evener.benchmark.device import environment
from evener.events import RunEvent
from evener.launch.nodes import LocalNode, parse_local_nodes
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


def plain_rank(_: RankEnvironment, config: PlainRun) -> None:
    """What a process of plain `yolo train` runs."""
    moments: list[tuple[int, float]] = []

    def note(trainer: Any) -> None:
        moments.append((trainer.epoch, time.perf_counter()))

    with alone(), contextlib.redirect_stdout(open(os.devnull, "w")):
        from evener.yolo.settings import read_training

        model, settings, _folder = read_training(config.words)
        model.add_callback("on_train_epoch_start", note)
        model.add_callback("on_train_batch_end", note)
        model.train(**settings, device="cpu")
    Path(config.output).write_text(json.dumps(moments))


def evener_rank(env: RankEnvironment, config: YoloConfig) -> None:
    """What a node runs."""
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        yolo_rank(env, config)


def plain_seconds(words: Sequence[str], node: LocalNode, folder: Path, batches: int) -> float:
    """Of a batch of plain `yolo train`, the median after the first epoch."""
    config = PlainRun((*words, f"save_dir={folder / 'plain'}"), str(folder / "moments.json"))
    run_local(plain_rank, [node], config, patience=120, on_event=lambda _: None)
    moments = [(epoch, moment) for epoch, moment in json.loads((folder / "moments.json").read_text()) if epoch > 0]
    epochs = sorted({epoch for epoch, _ in moments})
    by_epoch = [[moment for epoch, moment in moments if epoch == one] for one in epochs]
    return float(median((row[-1] - row[0]) / batches for row in by_epoch))


def evener_seconds(words: Sequence[str], nodes: Sequence[LocalNode], folder: Path, batches: int) -> float:
    """Of a batch through Evener, likewise."""
    records: list[TrainRecord] = []

    def keep(event: RunEvent) -> None:
        if isinstance(event, TrainRecord):
            records.append(event)

    config = YoloConfig(words=(*words, f"save_dir={folder / 'evener'}"))
    run_local(evener_rank, list(nodes), config, patience=120, on_event=keep)
    steps = [step for step in records[0].steps if step.epoch > 0]
    epochs = sorted({step.epoch for step in steps})
    return median(sum(step.seconds for step in steps if step.epoch == one) / batches for one in epochs)


def measure(words: Sequence[str], batches: int) -> dict[str, float]:
    """One round: by way, its speed over the sum of the speeds of plain `yolo train` on its nodes."""
    found = {}
    for way, speeds in WAYS.items():
        nodes = parse_local_nodes(speeds)
        with tempfile.TemporaryDirectory() as folder:
            plain = plain_seconds(words, parse_local_nodes("1")[0], Path(folder), batches)
        with tempfile.TemporaryDirectory() as folder:
            ours = evener_seconds(words, nodes, Path(folder), batches)
        found[way] = plain / ours / sum(node.speed_at(0) for node in nodes)
    return found


def main() -> None:
    """Run the rounds and print the table, or an object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--batches", type=int, default=2, help="of an epoch of the data")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"epochs={asked.epochs}", "val=False", "plots=False", "close_mosaic=0"]
    rounds = []
    for number in range(asked.rounds):
        rounds.append(measure(words, asked.batches))
        if not asked.json:
            print(f"round {number + 1}: " + ", ".join(f"{way} {value:.1%}" for way, value in rounds[-1].items()))
    middle = {way: median(one[way] for one in rounds) for way in WAYS}
    if asked.json:
        print(json.dumps({"rounds": rounds, "median": middle, "wanted": WANTED, "environment": environment()}))
        return
    for way, value in middle.items():
        print(f"{way} ({WAYS[way]}): {value:.1%} of the sum of plain speeds; wanted {WANTED[way]:.0%}")


if __name__ == "__main__":
    main()
