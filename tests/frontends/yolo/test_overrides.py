"""What is asked of a training of Ultralytics: its own words, and the options of `evener train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.config.run_config import RunConfig
from evener.frontends.yolo.overrides import (
    YoloConfig,
    read_master_overrides,
    read_overrides,
    require_searchable,
    run_config,
    yolo_config,
)
from evener.records.errors import InvalidInput
from evener.search.options import TuneConfig
from support.refusals import refused


def test_yolo_arguments_are_read_as_named_settings() -> None:
    words = ("segment", "train", "model=yolov8n-seg.yaml", "data = coco8-seg.yaml", "epochs=3", "lr0=0.01")
    assert read_overrides(words) == {
        "task": "segment",
        "model": "yolov8n-seg.yaml",
        "data": "coco8-seg.yaml",
        "epochs": "3",
        "lr0": "0.01",
    }


def test_resume_arguments_name_the_checkpoint() -> None:
    assert read_overrides(("train", "resume", "model=last.pt")) == {"resume": "True", "model": "last.pt"}
    assert read_overrides(("train", "resume=last.pt")) == {"resume": "last.pt"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("detect", "train"), "name a model, such as model=yolov8n.pt"),
        (("detekt", "train", "model=a.pt"), "'detekt' is neither train, nor one of detect, segment"),
        (("val", "model=a.pt"), "'val' is neither train"),
        (("detect", "tune", "model=a.pt"), "evener tune yolov8n.pt"),
        (
            ("train", "model=a.pt", "task=depth"),
            "task must be one of detect, segment, classify, pose, obb, got 'depth'",
        ),
        (("train", "model=a.pt", "batch=-2"), "batch must be a number of images of one step over all nodes"),
        (("train", "model=a.pt", "batch=1.5"), "batch must be a number of images"),
        (("train", "model=a.pt", "batch=0"), "batch must be a number of images"),
        (("train", "model=a.pt", "device=0,1"), "device=0,1 does not go with Evener: nodes are named by --devices"),
        (("train", "model=a.pt", "mode=val"), "mode=val does not go with Evener"),
        (("train", "model=a.pt", "rect=True"), "rect=True does not go with Evener: its batches are not shuffled"),
        (("train", "model=a.pt", "time=2"), "time=2 does not go with Evener"),
        (("train", "model=a.pt", "compile=default"), "compile=default does not go with Evener"),
        (("train", "data=coco8.yaml", "resume=none"), "name a model, such as model=yolov8n.pt"),
        (("train", "data=coco8.yaml", "resume=0"), "name a model, such as model=yolov8n.pt"),
        (("train", "model=a.pt", "epochs="), "epochs must be key=value, got ''"),
    ],
)
def test_settings_unsupported_on_nodes_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_overrides(words)
    assert sentence in str(caught.value)


def test_unsupported_settings_at_their_defaults_are_accepted() -> None:
    read_overrides(("train", "mode=train", "model=a.pt", "rect=False", "compile=false", "time=None"))


@pytest.mark.parametrize(
    "options",
    [{"thin": True}, {"metric": "loss"}, {"precision": "fp64"}, {"agreement": "sync"}],
    ids=str,
)
def test_options_of_searches_for_tasks_are_refused_for_yolo(options: dict[str, Any]) -> None:
    require_searchable(TuneConfig(task="yolov8n.pt"))
    require_searchable(TuneConfig(task="yolov8n.pt", home=Path("master")))
    with pytest.raises(InvalidInput):
        require_searchable(TuneConfig(task="yolov8n.pt", **options))


def test_trusted_files_are_for_searches_of_yolo_alone() -> None:
    TuneConfig(task="yolov8n.pt", trusted_only=True)
    with pytest.raises(InvalidInput):
        TuneConfig(task="digits", trusted_only=True)


def test_suffix_distinguishes_yolo_models_from_tasks() -> None:
    assert RunConfig(task="yolov8n.pt").is_yolo
    assert RunConfig(task="path/to/yolov8n.yaml").is_yolo
    assert not RunConfig(task="digits").is_yolo
    assert not RunConfig(task="path/to/task.py").is_yolo


def test_train_options_become_yolo_arguments() -> None:
    config = RunConfig(
        task="yolov8n.yaml",
        data=Path("coco8.yaml"),
        epochs=3,
        batch_size=16,
        option={"imgsz": "640"},
        local_nodes="1,0.5",
        shares="2,1",
    )
    asked = yolo_config(config)
    assert asked.overrides == ("train", "model=yolov8n.yaml", "data=coco8.yaml", "batch=16", "epochs=3", "imgsz=640")
    assert (asked.local_nodes, asked.shares, asked.elastic) == ("1,0.5", "2,1", None)
    for elastic in (True, False):
        assert yolo_config(msgspec.structs.replace(config, elastic=elastic)).elastic is elastic


@pytest.mark.parametrize("data", ["https://host/a/my.yaml", "http://host/my.yaml", "folder/my.yaml", "/my.yaml"])
def test_data_at_an_address_survive_the_way_to_a_master_and_back(data: str) -> None:
    config = YoloConfig(overrides=("train", "model=a.pt", f"data={data}"), home=Path("home"))
    assert f"data={data}" in yolo_config(run_config(config)).overrides


def test_unsupported_train_options_are_refused() -> None:
    with refused(InvalidInput):
        yolo_config(RunConfig(task="yolov8n.pt", strategy="filter"))
    with refused(InvalidInput):
        yolo_config(RunConfig(task="last.pt", resume=True))


def test_configuration_survives_json() -> None:
    config = YoloConfig(overrides=("train", "model=a.pt"), local_nodes="1,1")
    assert msgspec.json.decode(msgspec.json.encode(config), type=YoloConfig) == config


def test_yolo_arguments_become_train_options_on_a_master() -> None:
    words = ("detect", "train", "model=yolov8n.pt", "data=coco8.yaml", "batch=16", "imgsz=640")
    asked = run_config(YoloConfig(overrides=words, master="192.168.1.10:7117", shares="2,1", ship_data=True))
    assert (asked.task, asked.data, asked.master) == ("yolov8n.pt", Path("coco8.yaml"), "192.168.1.10:7117")
    assert (asked.shares, asked.ship_data, asked.has_ranks_on_master) == ("2,1", True, True)
    assert set(yolo_config(asked).overrides) == {*words[1:], "task=detect"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"master": "here", "local_nodes": "1,1"}, "name that with --master or --home"),
        ({"master": "here", "stationary": True}, "--stationary does not go with the nodes of a master"),
        ({"ship_data": True}, "--ship-data belongs to"),
        ({"token": "secret"}, "--token belongs to"),
    ],
)
def test_options_incompatible_with_or_without_a_master_are_refused(said: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        run_config(YoloConfig(overrides=("train", "model=a.pt", "data=b.yaml"), **said))


def test_options_of_agreements_are_taken() -> None:
    config = RunConfig(task="a.pt", agreement="federated", fraction=0.5, system=Path("system.json"))
    assert yolo_config(config).overrides == ("train", "model=a.pt")


@pytest.mark.parametrize("is_agreed", [True, False])
def test_resume_from_a_file_is_refused_on_a_master(is_agreed: bool) -> None:
    with refused(InvalidInput):
        read_master_overrides(("train", "resume", "model=last.pt"), is_agreed=is_agreed)
    assert read_master_overrides(("train", "model=a.pt", "resume=False"), is_agreed=is_agreed)


def test_nbs_setting_is_refused_where_every_batch_is_a_step() -> None:
    with refused(InvalidInput):
        read_master_overrides(("train", "model=a.pt", "nbs=64"), is_agreed=True)
    assert read_master_overrides(("train", "model=a.pt", "nbs=64"), is_agreed=False)["nbs"] == "64"
