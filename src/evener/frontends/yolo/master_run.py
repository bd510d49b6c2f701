"""`evener train yolov8n.pt --master ADDRESS`, with or without `--agreement`: a YOLO on the nodes of a master.

train_yolo_as_ranks      overrides, first weights -> a program for every node -> ranks -> last.pt and best.pt
train_yolo_by_agreement  settings, first weights -> a task for every node -> merged weights -> last.pt and best.pt
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evener.commands.engines import torch_backend
from evener.commands.train_as_ranks import submit_ranks
from evener.commands.train_by_agreement import submit_agreement
from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import described_here
from evener.frontends.yolo.first_weights import write_first_weights
from evener.frontends.yolo.local_training import LocalTraining
from evener.frontends.yolo.overrides import yolo_config
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.rank_on_node import FIRST_WEIGHTS
from evener.frontends.yolo.results_io import restore_results
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, read_training
from evener.ps.protocol.blob import Blob
from evener.records.record import WEIGHTS, TrainRecord
from evener.report.html import write_page
from evener.training.console import open_console

_PROGRAM = Path(__file__).with_name("node_program.py")
_NODE_TASK = Path(__file__).with_name("node_task.py")
_CHOSEN_HERE = ("save_dir=", "project=", "name=", "exist_ok=")
"""Overrides for the folder of the results, which is on this machine."""
_OF_THIS_MACHINE = ("model", "save_dir", "project", "name", "exist_ok", "epochs", "batch", "seed", "plots", "val")
"""Settings that are not sent to nodes, or are sent in another way."""


def train_yolo_as_ranks(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
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
                record = submit_ranks(sent, to_stderr=as_json, program=program)
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


def train_yolo_by_agreement(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: the options cannot be combined, or the run ended early.
    """
    open_console(as_json).print(licence)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with alone(), in_a_sentence():
            request = read_training(yolo_config(config).overrides)
        config, training = _prepared(config, request)
        record = submit_agreement(config, torch_backend(training.task, config), training.task, to_stderr=as_json)
        with alone():
            finish(training, record)
    write_page(request.folder / "report.html", {request.folder.name: record}, title=f"YOLO: {request.folder.name}")
    return record


def _prepared(config: RunConfig, request: YoloTraining) -> tuple[RunConfig, LocalTraining]:
    """The run of the task that nodes are sent, and that task with its first weights."""
    common, data_dir = _common_settings(request.settings)
    architecture = request.model.model.yaml
    weights = request.model.model if request.model.ckpt else None
    common |= {"task": request.model.task, "epochs": config.epochs or request.settings.get("epochs", 100)}
    common |= {"batch": config.batch_size or request.settings.get("batch", 16), "seed": config.seed}
    local = {"model": config.task} | {name: request.settings.get(name, True) for name in ("plots", "val")}
    training = LocalTraining({**common, **local}, architecture, data_dir, weights=weights, folder=request.folder)
    return replace(
        config,
        task=str(_NODE_TASK),
        data=data_dir,
        option={"settings": json.dumps(common), "architecture": json.dumps(architecture)},
        batch_size=common["batch"],
        epochs=common["epochs"],
        output=request.folder,
        trusted_only=False,
    ), training


def _common_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Return the settings that all nodes share, and the folder of the description of the data if it is a file here."""
    common = {key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE}
    file = Path(str(common.get("data", "")))
    if not file.is_file():
        return common, None
    return {**common, "data": file.name}, file.resolve().parent


def finish(training: LocalTraining, record: TrainRecord) -> None:
    """Validate the averaged weights, and write last.pt, best.pt and results.csv as Ultralytics does."""
    trainer, net = training.trainer, training.net
    trainer.ema.ema.load_state_dict(net.average.state_dict())
    trainer.ema.updates = int(net.updates)
    trainer.epoch = trainer.epochs - 1
    trainer.train_time_start = time.time() - record.seconds
    trainer.loss_items = training.zero_losses()
    trainer.loss = sum(trainer.loss_items.values())
    trainer.metrics, trainer.fitness = trainer.validate()
    trainer.save_metrics(metrics=trainer.metrics)
    trainer.save_model()
    trainer.final_eval()
