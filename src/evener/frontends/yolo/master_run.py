"""`evener train yolov8n.pt --master ADDRESS`: nodes of a master train together, to the weights of one process.

words, first weights -> a program for every node -> run -> weights -> last.pt and best.pt
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evener.commands.train_on_master import submit
from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import described_here
from evener.frontends.yolo.first_weights import write_first_weights
from evener.frontends.yolo.hosted import FIRST_WEIGHTS
from evener.frontends.yolo.plain_results import restore_results
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, read_training
from evener.frontends.yolo.words import yolo_config
from evener.ps.node.rank_session import WEIGHTS
from evener.ps.protocol.blob import Blob
from evener.records.record import TrainRecord
from evener.report.html import write_page
from evener.training.console import open_console

_PROGRAM = Path(__file__).with_name("node_program.py")
_CHOSEN_HERE = ("save_dir=", "project=", "name=", "exist_ok=")
"""Words for the folder of the results, which is this machine's."""


def train_together(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: what was asked for cannot be done; or the run ended before it was complete.
    """
    open_console(as_json).print(licence)
    words = yolo_config(config).words
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with alone(), in_a_sentence():
            asked = read_training(words)
        try:
            with _program(asked.model) as program:
                told = _asked_of_ranks(config, words, asked.folder)
                record = submit(told, to_stderr=as_json, program=program)
        finally:
            if (asked.folder / WEIGHTS).exists():  # of a run that was ended, too
                with alone(), in_a_sentence():
                    _write(asked)
    write_page(asked.folder / "report.html", {asked.folder.name: record}, title=f"YOLO: {asked.folder.name}")
    return record


@contextlib.contextmanager
def _program(model: Any) -> Iterator[Blob]:
    """What is sent to the nodes: the file that their ranks run, and the weights of a `.pt` to begin with."""
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as name:
        folder, files = Path(name), [_PROGRAM.name]
        shutil.copy(_PROGRAM, folder)
        if model.ckpt:
            write_first_weights(model, folder / FIRST_WEIGHTS)
            files.append(FIRST_WEIGHTS)
        yield Blob(folder, files)


def _asked_of_ranks(config: RunConfig, words: tuple[str, ...], folder: Path) -> RunConfig:
    """What is asked of the nodes: the file that they run, the words, and the folder of the description of the data."""
    sent = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith(_CHOSEN_HERE))
    data = Path(sent.get("data", ""))
    if data.is_file():
        sent["data"] = data.name
    place = data.resolve().parent if data.is_file() else None
    return replace(config, task=str(_PROGRAM), data=place, option={"words": json.dumps(sent)}, output=folder)


def _write(asked: YoloTraining) -> None:
    """The files of Ultralytics, from what the first rank has left."""
    file, kind = asked.folder / WEIGHTS, asked.model._smart_load("trainer")
    settings = {**asked.settings, "task": asked.model.task, "save_dir": str(asked.folder), "device": "cpu"}
    data = Path(str(settings.get("data", "")))
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as own:
        if data.is_file():
            settings["data"] = str(described_here(data.resolve().parent, data.name, Path(own)))
        trainer = kind(overrides={**settings, "model": asked.model.ckpt_path or asked.model.cfg})
    trainer.setup_model()  # with the classes of the data
    trainer.set_model_attributes()
    restore_results(trainer.model, vars(trainer.args), file, asked.folder)
    file.unlink()
