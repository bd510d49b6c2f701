"""`evener train yolov8n.pt --agreement average`: nodes train by themselves, a master merges what they have come to.

settings and first weights -> a task for every node -> run -> weights -> validation, last.pt and best.pt
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evener.commands.backends import torch_backend
from evener.commands.train_agreement import submit
from evener.config.run_config import RunConfig
from evener.frontends.yolo.local_training import LocalTraining
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, read_training
from evener.frontends.yolo.words import yolo_config
from evener.records.record import TrainRecord
from evener.report.html import write_page
from evener.training.console import open_console

_NODE_TASK = Path(__file__).with_name("node_task.py")
_OF_THIS_MACHINE = ("model", "save_dir", "project", "name", "exist_ok", "epochs", "batch", "seed", "plots", "val")
"""Settings that nodes are not sent, or are sent otherwise."""


def train_on_nodes(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: what was asked for cannot be done; or the run ended before it was complete.
    """
    open_console(as_json).print(licence)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with alone(), in_a_sentence():
            asked = read_training(yolo_config(config).words)
        config, training = _prepared(config, asked)
        record = submit(config, torch_backend(training.task, config), training.task, to_stderr=as_json)
        with alone():
            finish(training, record)
    write_page(asked.folder / "report.html", {asked.folder.name: record}, title=f"YOLO: {asked.folder.name}")
    return record


def _prepared(config: RunConfig, asked: YoloTraining) -> tuple[RunConfig, LocalTraining]:
    """The run of the task that nodes are sent, and that task with its first weights."""
    common, data_dir = _common_settings(asked.settings)
    architecture = asked.model.model.yaml
    weights = asked.model.model if asked.model.ckpt else None
    common |= {"task": asked.model.task, "epochs": config.epochs or asked.settings.get("epochs", 100)}
    common |= {"batch": config.batch_size or asked.settings.get("batch", 16), "seed": config.seed}
    own = {"model": config.task} | {name: asked.settings.get(name, True) for name in ("plots", "val")}
    training = LocalTraining({**common, **own}, architecture, data_dir, weights=weights, folder=asked.folder)
    return replace(
        config,
        task=str(_NODE_TASK),
        data=data_dir,
        option={"settings": json.dumps(common), "architecture": json.dumps(architecture)},
        batch_size=common["batch"],
        epochs=common["epochs"],
        output=asked.folder,
    ), training


def _common_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """What is the same on every node, and the folder of the description of the data if it is a file here."""
    found = {key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE}
    file = Path(str(found.get("data", "")))
    if not file.is_file():
        return found, None
    return {**found, "data": file.name}, file.resolve().parent


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
