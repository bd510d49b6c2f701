"""YOLO through Evener beside plain `yolo train`: one node, nodes of unequal speed, two equal ones; in turn.

    python benchmarks/yolo.py --data my-data.yaml [--imgsz 320] [--rounds 3] [--cached] [--ways "one node"] [--json]

Every node is a process on a core of its own, with one thread. A node of speed 0.5 idles as long as it computes, so
plain `yolo train` on it would be half as fast as on the other one. Seconds are those of batches after the first epoch,
loading included, validation not; figures are medians over the rounds of ratios to what plain `yolo train` took right
before and right after. Two cores share caches and memory, as two machines do not: what that takes is shown by two
trainings of plain `yolo train` at once, which know nothing of each other. A step is as many batches as 64 images make,
as it is after the warm-up of a training. With `--cached` all images are decoded before the training begins, as they are
after some epochs if memory holds them. Where a machine does other things besides, `yolo_turns.py` compares one node.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from results import open_results, parser_of
from turns import beside, ratios

from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import TrainRecord
from evener.system.cores import compute_in

WAYS = {"one node": "1", "unequal nodes": "1,0.5", "equal nodes": "1,1"}
"""What is compared with plain `yolo train`: speeds of nodes."""
WANTED = {"one node": 0.97, "unequal nodes": 0.9, "equal nodes": 0.9}


class PlainRun(msgspec.Struct, frozen=True):
    """Plain `yolo train`, of some words, that writes the moments of its batches into a file.

    Attributes:
        words: of it.
        output: the file, behind whose name each process puts its number.
        is_paired: whether its batches are those that nodes have, image by image, with what is drawn for each.
        is_rounded: whether its first weights are rounded otherwise.
        is_backwards: with `is_paired`, whether the images of every batch lie in the opposite order.
    """

    words: tuple[str, ...]
    output: str
    is_paired: bool = False
    is_rounded: bool = False
    is_backwards: bool = False


class ValidatedRun(msgspec.Struct, frozen=True):
    """A validation of `weights`, whose mAP50-95 is written into the file `output`."""

    weights: str
    data: str
    imgsz: int
    output: str


def quiet() -> contextlib.redirect_stdout[Any]:
    """Inside, nothing is printed; torchvision can be imported where its own operators do not load."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import torchvision_operators  # noqa: F401

    return contextlib.redirect_stdout(open(os.devnull, "w"))


def run_plain(program: Callable[[int, Any], None], config: Any, count: int = 1) -> None:
    """Run `program` in so many processes that are no nodes, each of which gets its number and `config`, to the end."""
    context = get_context("spawn")
    processes = [context.Process(target=as_node, args=(program, config, number)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process of plain YOLO has failed")


def as_node(program: Callable[[int, Any], None], config: Any, number: int) -> None:
    """Run `program` here, on a core and with a thread, as a node would; all else is as the system has it."""
    os.sched_setaffinity(0, parse_local_nodes(",".join(["1"] * (number + 1)))[number].cores)
    compute_in(1)
    program(number, config)


def plain_rank(number: int, config: PlainRun) -> None:
    """What a process of plain `yolo train` runs."""
    moments: list[tuple[int, float]] = []

    def note(trainer: Any) -> None:
        moments.append((trainer.epoch, time.perf_counter()))

    with quiet(), alone():
        from evener.frontends.yolo.settings import read_training

        model, settings, folder, _ = read_training(config.words)
        settings["save_dir"] = str(folder.with_name(f"{folder.name}{number}"))
        model.add_callback("on_train_epoch_start", note)
        model.add_callback("on_train_batch_end", note)
        base = model._smart_load("trainer")
        if config.is_paired or config.is_rounded:
            from support.plain_yolo import in_order_of_nodes, round_otherwise

            base = in_order_of_nodes(base, is_backwards=config.is_backwards) if config.is_paired else base
            if config.is_rounded:
                model.add_callback("on_train_start", round_otherwise)
        model.train(trainer=base, **settings, device="cpu")
    Path(f"{config.output}{number}").write_text(json.dumps(moments))


def validate_rank(_: int, asked: ValidatedRun) -> None:
    """What a process runs that validates a model of plain `yolo train`."""
    with quiet(), alone():
        from ultralytics import YOLO

        found = YOLO(asked.weights).val(data=asked.data, imgsz=asked.imgsz, plots=False, device="cpu", verbose=False)
    Path(asked.output).write_text(str(found.box.map))


def evener_rank(env: RankEnvironment, config: YoloConfig) -> None:
    """What a node runs."""
    with quiet():
        yolo_rank(env, config)


def plain_seconds(words: Sequence[str], batches: int, at_once: int = 1) -> float:
    """Of a batch of plain `yolo train` on one node, the median of the epochs after the first; or of several at once."""
    with tempfile.TemporaryDirectory() as folder:
        config = PlainRun((*words, f"save_dir={folder}/plain"), f"{folder}/moments")
        run_plain(plain_rank, config, at_once)
        found = [json.loads(Path(f"{folder}/moments{number}").read_text()) for number in range(at_once)]
    rows = [
        [moment for epoch, moment in moments if epoch == one]
        for moments in found
        for one in sorted({epoch for epoch, _ in moments} - {0})
    ]
    return float(median((row[-1] - row[0]) / batches for row in rows))


def evener_seconds(words: Sequence[str], speeds: str, batches: int) -> tuple[float, Plan]:
    """Of a batch through Evener on nodes of some speeds, likewise; and the plan that the run began with."""
    records: list[TrainRecord] = []

    def keep(event: RunEvent) -> None:
        if isinstance(event, TrainRecord):
            records.append(event)

    with tempfile.TemporaryDirectory() as folder:
        config = YoloConfig(overrides=(*words, f"save_dir={folder}/evener"))
        nodes = parse_local_nodes(speeds)
        run_local(evener_rank, nodes, config, patience=120, on_event=keep, is_elastic=len(nodes) > 1)
    steps = [step for step in records[0].steps if step.epoch > 0]
    seconds = median(sum(s.seconds for s in steps if s.epoch == one) / batches for one in {s.epoch for s in steps})
    return seconds, records[0].plan


def main() -> None:
    """Run the rounds and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=13)
    parser.add_argument("--batches", type=int, default=2, help="of an epoch of the data")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cached", action="store_true", help="images are decoded before the training begins")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="what is compared; all if left out")
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"epochs={asked.epochs}", "val=False", "plots=False", "close_mosaic=0", "warmup_epochs=0"]
    words += ["cache=ram"] if asked.cached else []
    shares: dict[str, list[str]] = {way: [] for way in asked.ways}
    predicted: dict[str, list[float]] = {way: [] for way in asked.ways}

    def through_evener(way: str) -> float:
        seconds, plan = evener_seconds(words, WAYS[way], asked.batches)
        shares[way].append(":".join(str(assignment.samples) for assignment in plan.assignments))
        predicted[way] += [plan.prediction.step_seconds] if plan.prediction is not None else []
        return seconds

    with open_results(asked) as results:
        ways = {way: partial(through_evener, way) for way in asked.ways}
        ways["two at once"] = partial(plain_seconds, words, asked.batches, at_once=2)
        found = beside(partial(plain_seconds, words, asked.batches), ways, asked.rounds)
        seconds, plain = found.pop("two at once")
        results.add(
            "two of plain YOLO at once: {of_sum:.1%} of the sum of their speeds",
            way="two at once",
            of_sum=ratios(plain, seconds),
            seconds=seconds,
            plain_seconds=plain,
        )
        for way, (seconds, plain) in found.items():
            ideal = sum(node.speed_at(0) for node in parse_local_nodes(WAYS[way]))
            results.add(
                "{way} ({speeds}): {of_sum:.1%} of the sum of the speeds of plain YOLO; wanted {wanted:.0%}; "
                "divided {shares}; predicted seconds of a batch {predicted}, measured {seconds}",
                way=way,
                speeds=WAYS[way],
                shares=", ".join(shares[way]),
                of_sum=ratios(plain, [one * ideal for one in seconds]),
                wanted=WANTED[way],
                predicted=predicted[way],
                seconds=seconds,
                plain_seconds=plain,
            )


if __name__ == "__main__":
    import_module("yolo").main()  # ranks import what is defined here
