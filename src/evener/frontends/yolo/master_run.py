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
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec.structs import replace
from ultralytics.cfg import TASK2DATA
from ultralytics.utils.metrics import (
    ClassifyMetrics,
    ConfusionMatrix,
    DetMetrics,
    OBBMetrics,
    PoseMetrics,
    SegmentMetrics,
)

from evener.commands.engines import torch_backend
from evener.commands.train_as_ranks import submit_ranks
from evener.commands.train_by_agreement import submit_agreement
from evener.config.run_config import RunConfig
from evener.frontends.yolo.data_place import SENT_IMAGES, described_here, place_of, sent_images
from evener.frontends.yolo.first_weights import write_first_weights
from evener.frontends.yolo.local_training import LocalTraining, keep_silent
from evener.frontends.yolo.overrides import yolo_config
from evener.frontends.yolo.packed_training import is_text, packed_code
from evener.frontends.yolo.rank import alone
from evener.frontends.yolo.rank_on_node import FIRST_WEIGHTS, USER_CODE, minor_version
from evener.frontends.yolo.results_io import read_metrics, restore_results
from evener.frontends.yolo.settings import YoloTraining, in_a_sentence, quiet_ultralytics, read_training
from evener.ps.protocol.blob import Blob
from evener.records.record import WEIGHTS, TrainRecord
from evener.report.html import write_page
from evener.training.console import open_console

METRICS: dict[str, type[Any]] = {
    "detect": DetMetrics,
    "segment": SegmentMetrics,
    "classify": ClassifyMetrics,
    "pose": PoseMetrics,
    "obb": OBBMetrics,
}
"""Metrics of Ultralytics, by task."""
_PROGRAM = Path(__file__).with_name("node_program.py")
_NODE_TASK = Path(__file__).with_name("node_task.py")
_CHOSEN_HERE = ("save_dir", "exist_ok")
"""Overrides for the folder of the results, which is on this machine; trackers on the nodes show project and name."""
_OF_THIS_MACHINE = (
    "model",
    "save_dir",
    "project",
    "name",
    "exist_ok",
    "epochs",
    "batch",
    "seed",
    "plots",
    "val",
    "pretrained",
)
"""Settings that are not sent to nodes, or are sent in another way."""


class MasterResults(NamedTuple):
    """Results of a training on the nodes of a master, besides the files in its folder.

    Attributes:
        record: of the run.
        trainer: what the trainer says of the training, by attribute; its settings are `args`.
        metrics: of the best weights, as Ultralytics has them for the task.
    """

    record: TrainRecord
    trainer: dict[str, Any]
    metrics: Any


def train_yolo_as_ranks(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: the options cannot be combined, or the run ended early.
    """
    with _shown(as_json, licence):
        with alone(), in_a_sentence():
            training = read_training(yolo_config(config).overrides)
        return train_on_nodes(config, training, to_stderr=as_json).record


def train_on_nodes(config: RunConfig, training: YoloTraining, *, to_stderr: bool = False) -> MasterResults:
    """Train on the nodes of a master, with the user's own model, callbacks and trainer class. Raises like the command.

    Args:
        config: of the run.
        training: of the model.
        to_stderr: keep stdout free.
    """
    training = completed(training)
    code = packed_code(training)
    results: dict[str, Any] = {}
    metrics = METRICS[training.model.task]()
    try:
        with _without_empty_folder(training.folder), program_of(training, code) as program:
            with alone(), in_a_sentence():
                trainer = trainer_here(training)
            facts = {"python": minor_version()} if code else {}
            sent = config_of_ranks(config, training, facts, sends_data=config.ship_data)
            record = submit_ranks(sent, to_stderr=to_stderr, program=program)
    finally:
        if (training.folder / WEIGHTS).exists():  # also after a run that was stopped
            with alone(), quiet_ultralytics(), in_a_sentence():
                results = take_results(training, trainer, metrics)
    _write_page(training.folder, record)
    return MasterResults(record, results, metrics)


def completed(training: YoloTraining) -> YoloTraining:
    """Return `training` with the settings that Ultralytics takes from the model's file where the user names none."""
    model, settings = training.model, training.settings
    of_model = {name: value for name, value in model.overrides.items() if name not in ("model", "task")}
    data = settings.get("data") or TASK2DATA[model.task]
    return training._replace(settings={**of_model, **settings, "data": data})


def begins_with_weights(training: YoloTraining) -> bool:
    """Return whether the training begins with the weights of its model, and not with drawn ones."""
    return bool(training.model.ckpt) and training.settings.get("pretrained") is not False


@contextlib.contextmanager
def _shown(as_json: bool, licence: str) -> Iterator[None]:
    """Show the licence, and keep stdout free inside if the results are one line of JSON."""
    open_console(as_json).print(licence)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _without_empty_folder(folder: Path) -> Iterator[None]:
    """Remove the folder of a training that fails inside before it has left more than its settings there."""
    try:
        yield
    except BaseException:
        if all(file.name == "args.yaml" for file in folder.rglob("*") if file.is_file()):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_page(folder: Path, record: TrainRecord) -> None:
    write_page(folder / "report.html", {folder.name: record}, title=f"YOLO: {folder.name}")


@contextlib.contextmanager
def program_of(training: YoloTraining, code: bytes) -> Iterator[Blob]:
    """Pack the program for the nodes: the file that their ranks run, the model, and the user's own code."""
    model = training.model
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as name:
        folder = Path(name)
        shutil.copy(_PROGRAM, folder)
        if begins_with_weights(training):
            write_first_weights(model, folder / FIRST_WEIGHTS)
        else:
            (folder / _description_of(model)).write_text(yaml.safe_dump(model.model.yaml))
        if code:
            (folder / USER_CODE).write_bytes(code)
        yield Blob(folder, sorted(file.name for file in folder.iterdir()))


def _description_of(model: Any) -> str:
    """Return the name of the file that describes a model, by which Ultralytics tells its size."""
    return Path(model.cfg or model.model.yaml["yaml_file"]).name


def config_of_ranks(config: RunConfig, training: YoloTraining, facts: dict[str, str], *, sends_data: bool) -> RunConfig:
    """Return the config for the nodes: the file that they run, the overrides, `facts`, and the folder of the data.

    Raises:
        InvalidInput: the data are to be sent, and are not all in the folder of their description.
    """
    sent = {name: str(value) for name, value in training.settings.items() if is_text(value)}
    sent |= dict(word.split("=", 1) for word in yolo_config(config).overrides if "=" in word)
    sent = {name: value for name, value in sent.items() if name not in _CHOSEN_HERE} | {"name": training.folder.name}
    data = str(training.settings["data"])
    sent["data"], place = place_of(data)
    if sends_data:
        sent[SENT_IMAGES] = sent_images(data)
    if not begins_with_weights(training):
        sent["model"] = _description_of(training.model)
    return replace(
        config,
        task=str(_PROGRAM),
        data=place,
        option={"overrides": json.dumps(sent), **facts},
        output=training.folder,
        trusted_only=False,
    )


def trainer_here(training: YoloTraining) -> Any:
    """Return a trainer of Ultralytics for the results of the nodes, with settings and data, that trains nothing."""
    model = training.model
    kind = training.trainer or model._smart_load("trainer")
    settings = {**training.settings, "task": model.task, "save_dir": str(training.folder), "device": "cpu"}
    data = Path(str(settings["data"]))
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as scratch:
        if data.is_file():
            settings["data"] = str(described_here(data.resolve().parent, data.name, Path(scratch)))
        silent = type(f"Silent{kind.__name__}", (kind,), {"run_callbacks": keep_silent})
        return silent(overrides={**settings, "model": model.overrides["model"]})


def take_results(training: YoloTraining, trainer: Any, metrics: Any) -> dict[str, Any]:
    """Write the files of Ultralytics from the results of the first rank, and let `metrics` have its metrics.

    Returns:
        What the trainer says of the training, by attribute; empty after one that was stopped.
    """
    file = training.folder / WEIGHTS
    weights = training.model.model if begins_with_weights(training) else None
    trainer.model = trainer.get_model(cfg=deepcopy(training.model.model.yaml), weights=weights)
    trainer.set_model_attributes()
    restore_results(trainer.model, vars(trainer.args), file, training.folder)
    metrics.confusion_matrix = ConfusionMatrix(task=training.model.task)
    results = read_metrics(file, metrics)
    metrics.save_dir = training.folder
    file.unlink()
    return {**results, "args": trainer.args} if results else {}


def train_yolo_by_agreement(config: RunConfig, *, as_json: bool, licence: str) -> TrainRecord:
    """Train on the nodes of a master; the record, when everything is in the folder that Ultralytics chooses.

    Raises:
        EvenerError: the options cannot be combined, or the run ended early.
    """
    with _shown(as_json, licence):
        with alone(), in_a_sentence():
            training = read_training(yolo_config(config).overrides)
        return train_by_agreement(config, training, to_stderr=as_json)[0]


def train_by_agreement(
    config: RunConfig, training: YoloTraining, *, to_stderr: bool = False
) -> tuple[TrainRecord, Any]:
    """Train on nodes that train by themselves, with the user's own model. Raises like the command.

    Returns:
        The record, and the trainer of Ultralytics that has validated the result.
    """
    training = completed(training)
    images = sent_images(str(training.settings["data"])) if config.ship_data else None
    with _without_empty_folder(training.folder):
        config, local = _prepared(config, training, {} if images is None else {SENT_IMAGES: images})
        record = submit_agreement(config, torch_backend(local.task, config), local.task, to_stderr=to_stderr)
    with alone():
        finish(local, record)
    _write_page(training.folder, record)
    return record, local.trainer


def _prepared(config: RunConfig, request: YoloTraining, facts: dict[str, str]) -> tuple[RunConfig, LocalTraining]:
    """Return the run of the task that nodes are sent, with `facts` among its settings, and it with first weights."""
    common, data_dir = _common_settings(request.settings)
    common |= facts
    architecture = deepcopy(request.model.model.yaml)
    weights = request.model.model if begins_with_weights(request) else None
    common |= {"task": request.model.task, "epochs": config.epochs or request.settings.get("epochs", 100)}
    common |= {"batch": config.batch_size or request.settings.get("batch", 16)}
    common |= {"seed": config.seed or request.settings.get("seed", 0)}
    local = {"model": config.task} | {name: request.settings.get(name, True) for name in ("plots", "val")}
    training = LocalTraining({**common, **local}, architecture, data_dir, weights=weights, folder=request.folder)
    return replace(
        config,
        task=str(_NODE_TASK),
        data=data_dir,
        option={"settings": json.dumps(common), "architecture": json.dumps(architecture)},
        batch_size=common["batch"],
        epochs=common["epochs"],
        seed=common["seed"],
        output=request.folder,
        trusted_only=False,
    ), training


def _common_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Return the settings that all nodes share, and the folder of the data if they are on this machine."""
    common = {key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE}
    name, folder = place_of(str(common["data"]))
    return {**common, "data": name}, folder


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
