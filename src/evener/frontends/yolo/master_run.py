"""`evener train yolov8n.pt --master ADDRESS`: nodes of a master train together, to the weights of one process.

overrides, first weights -> a program for every node -> run -> weights -> last.pt and best.pt
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
from evener.frontends.yolo.overrides import yolo_config
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.remote_rank import FIRST_WEIGHTS
from evener.frontends.yolo.results_io import restore_results
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, read_training
from evener.ps.node.rank_session import WEIGHTS
from evener.ps.protocol.blob import Blob
from evener.records.record import TrainRecord
from evener.report.html import write_page
from evener.training.console import open_console

_PROGRAM = Path(__file__).with_name("node_program.py")
_CHOSEN_HERE = ("save_dir=", "project=", "name=", "exist_ok=")
"""Overrides for the folder of the results, which is on this machine."""


def train_together(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: the options cannot be combined, or the run ended early.
    """
    open_console(as_json).print(licence)
    overrides = yolo_config(config).overrides
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with alone(), in_a_sentence():
            request = read_training(overrides)
        try:
            with _program(request.model) as program:
                sent = _config_of_ranks(config, overrides, request.folder)
                record = submit(sent, to_stderr=as_json, program=program)
        finally:
            if (request.folder / WEIGHTS).exists():  # also after a run that was stopped
                with alone(), in_a_sentence():
                    _write(request)
    write_page(request.folder / "report.html", {request.folder.name: record}, title=f"YOLO: {request.folder.name}")
    return record


@contextlib.contextmanager
def _program(model: Any) -> Iterator[Blob]:
    """Pack the program for the nodes: the file that their ranks run, and the first weights of a `.pt`."""
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as name:
        folder, files = Path(name), [_PROGRAM.name]
        shutil.copy(_PROGRAM, folder)
        if model.ckpt:
            write_first_weights(model, folder / FIRST_WEIGHTS)
            files.append(FIRST_WEIGHTS)
        yield Blob(folder, files)


def _config_of_ranks(config: RunConfig, overrides: tuple[str, ...], folder: Path) -> RunConfig:
    """Return the config for the nodes: the file that they run, the overrides, and the folder of the data."""
    sent = dict(word.split("=", 1) for word in overrides if "=" in word and not word.startswith(_CHOSEN_HERE))
    data = Path(sent.get("data", ""))
    if data.is_file():
        sent["data"] = data.name
    place = data.resolve().parent if data.is_file() else None
    return replace(
        config,
        task=str(_PROGRAM),
        data=place,
        option={"overrides": json.dumps(sent)},
        output=folder,
        trusted_only=False,
    )


def _write(request: YoloTraining) -> None:
    """Write the files of Ultralytics from the results of the first rank."""
    file, kind = request.folder / WEIGHTS, request.model._smart_load("trainer")
    settings = {**request.settings, "task": request.model.task, "save_dir": str(request.folder), "device": "cpu"}
    data = Path(str(settings.get("data", "")))
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as scratch:
        if data.is_file():
            settings["data"] = str(described_here(data.resolve().parent, data.name, Path(scratch)))
        trainer = kind(overrides={**settings, "model": request.model.ckpt_path or request.model.cfg})
    trainer.setup_model()  # with the classes of the data
    trainer.set_model_attributes()
    restore_results(trainer.model, vars(trainer.args), file, request.folder)
    file.unlink()
