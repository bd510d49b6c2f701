"""One node through Evener beside plain `yolo train`, by turns of an epoch on one core: by the clock and the processor.

    python benchmarks/yolo_turns.py --data my-data.yaml [--imgsz 320] [--cached] [--beside-itself] [--json]

Both trainings run, and one waits while the other trains an epoch: whatever else the machine does, and however its clock
changes, meets both within seconds. A ratio is that of plain seconds to ours in two epochs that follow each other; the
first epoch is left out, and so is all that is done between epochs. With `--beside-itself` plain `yolo train` stands in
Evener's place, and what it is off by is the error of the measurement.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from results import open_results, parser_of
from turns import ratios
from yolo import as_node, quiet

from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local

PATIENCE = 3600.0
"""Seconds: who waits for his turn is silent."""


class Side(msgspec.Struct, frozen=True):
    """One of the two trainings.

    Attributes:
        number: 0 for the one that begins, or 1.
        is_plain: whether Ultralytics' own trainer trains.
        words: of it.
        folder: with a pipe for the turns of each side.
    """

    number: int
    is_plain: bool
    words: tuple[str, ...]
    folder: str

    def pipe(self, number: int) -> int:
        """That a side reads its turns from; open for both ends, so that nobody waits to open it."""
        return os.open(f"{self.folder}/turn{number}", os.O_RDWR)

    @property
    def moments(self) -> Path:
        """File of the (clock, processor time) at the begin and the end of every epoch's batches."""
        return Path(self.folder) / f"moments{self.number}"


class Seconds(NamedTuple):
    """Of every epoch after the first."""

    clock: list[float]
    processor: list[float]


def train_side(env: RankEnvironment | None, side: Side) -> None:
    """What the process of a side runs, which is a rank if there is an `env`; Ultralytics' loop tells it its turns."""
    moments: list[tuple[float, float]] = []
    own, other = side.pipe(side.number), side.pipe(1 - side.number)

    def begin(_trainer: Any) -> None:
        if moments:
            os.write(other, b".")
        os.read(own, 1)
        note(_trainer)

    def note(_trainer: Any) -> None:
        moments.append((time.perf_counter(), time.process_time()))

    with quiet():
        with alone():
            from ultralytics.utils.callbacks.base import default_callbacks

        default_callbacks["on_train_epoch_start"].append(begin)
        default_callbacks["on_train_epoch_end"].append(note)
        if env is None:
            _train_plain(side)
        else:
            yolo_rank(env, YoloConfig(overrides=side.words))
    os.write(other, b".")
    side.moments.write_text(json.dumps(moments))


def _train_plain(side: Side) -> None:
    with alone():
        from evener.frontends.yolo.settings import read_training

        model, settings, *_ = read_training(side.words)
        model.train(trainer=model._smart_load("trainer"), **settings, device="cpu")


def run_side(side: Side) -> None:
    """One training to its end."""
    if side.is_plain:
        as_node(lambda _, plain: train_side(None, plain), side, 0)
        return
    run_local(train_side, parse_local_nodes("1"), side, patience=PATIENCE, on_event=lambda _: None)


def in_turns(words: list[str], is_plain: tuple[bool, bool]) -> list[Seconds]:
    """What both trainings take."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            os.mkfifo(f"{folder}/turn{number}")
        sides = [Side(i, plain, (*words, f"save_dir={folder}/run{i}"), folder) for i, plain in enumerate(is_plain)]
        first = sides[0].pipe(0)
        os.write(first, b".")
        context = get_context("spawn")
        processes = [context.Process(target=run_side, args=(side,)) for side in sides]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit("a training has failed")
        os.close(first)
        return [_seconds(json.loads(side.moments.read_text())) for side in sides]


def _seconds(moments: list[list[float]]) -> Seconds:
    spans = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in zip(moments[::2], moments[1::2], strict=True)]
    return Seconds(*(list(kind) for kind in zip(*spans[1:], strict=True)))


def main() -> None:
    """Train twice, either one first, and print the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cached", action="store_true", help="images are decoded before the training begins")
    parser.add_argument("--beside-itself", action="store_true", help="plain `yolo train` on both sides")
    asked = parser.parse_args()
    words = ["train", f"model={asked.model}", f"data={asked.data}", f"imgsz={asked.imgsz}", f"batch={asked.batch}"]
    words += [f"epochs={asked.epochs}", "val=False", "plots=False", "close_mosaic=0", "warmup_epochs=0"]
    words += ["cache=ram"] if asked.cached else []
    with open_results(asked) as results:
        for plain_first in (True, False):
            found = in_turns(words, (plain_first or asked.beside_itself, not plain_first or asked.beside_itself))
            plain, own = found if plain_first else found[::-1]
            results.add(
                "{first} first: {clock:.1%} of the speed of plain YOLO by the clock, {processor:.1%} by processor time",
                first="plain" if plain_first else "the other one",
                clock=ratios(plain.clock, own.clock),
                processor=ratios(plain.processor, own.processor),
                seconds=own,
                plain_seconds=plain,
            )


if __name__ == "__main__":
    import_module("yolo_turns").main()  # processes import what is defined here
