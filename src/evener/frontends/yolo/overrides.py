"""The arguments of a training of Ultralytics: `detect train model=yolov8n.pt data=coco8.yaml epochs=100`.

Nothing here needs Ultralytics or PyTorch, so that invalid arguments are refused before anything is loaded.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, field
from msgspec.structs import fields

from evener.config.conflicts import AGREEMENT_OPTIONS, MASTER_OPTIONS, option_name
from evener.config.options import Home, MasterAddress, MasterToken, NodesConfig, TokenFile, TrustedOnly
from evener.config.run_config import RunConfig
from evener.launch.nodes import relative_shares
from evener.records.errors import InvalidInput, MissingExtra, require
from evener.records.record import Event
from evener.records.version import pip_install
from evener.search.options import TuneConfig

TASKS = ("detect", "segment", "classify", "pose", "obb")
_REFUSED = {
    "device": "nodes are named by --devices or --local-nodes",
    "mode": "Evener trains; for the rest there is the command yolo itself",
    "rect": "its batches are not shuffled, and nodes share out shuffled ones",
    "compile": "compiled models are not divided yet",
    "time": "nodes have clocks of their own: say how many epochs",
    "quantize": "training for int8 is for one process",
    "distill_model": "a teacher is for one process",
    "save_json": "validate best.pt afterwards: yolo val save_json=True",
}
"""Settings of Ultralytics that are not taken, and what to do instead."""
_TAKEN = (
    "task", "data", "option", "shares", "batch_size", "epochs", "seed", "workers", "output", "stationary", "elastic",
)  # fmt: skip
"""Options of `evener train` that a training of Ultralytics knows."""
_NO_RESUME = ("", "false", "none", "0")
_URL_AS_PATH = re.compile(r"^([a-z]{2,}):/(?=[^/])")
"""An address that was read as a path, which has lost a slash."""
_NOT_ON_MASTER = {
    "resume": "a master goes on by itself, when it or its nodes are started again",
    "save_period": "best.pt and last.pt come back from the nodes",
    "pretrained": "name these weights as the model",
}
"""Settings of Ultralytics that a training on a master's nodes does not take, and why."""
_NOT_AGREED = {
    "freeze": "nodes are sent what is trained",
    "nbs": "every batch of a node is a step",
}
"""Settings that are not supported where nodes train independently, and why."""


class YoloConfig(NodesConfig, frozen=True, kw_only=True):
    """The options of a training of Ultralytics; sent to every rank.

    Attributes:
        to_stderr: keep stdout free.
        goes_on: whether a script of the user goes on with the result on every rank.
        started: when, in seconds since 1970.
        lost: events of lost nodes, without which the training goes on.
        usual: options from `evener.toml`, and that file; empty without any.
    """

    overrides: Annotated[
        tuple[str, ...], Meta(description="detect, segment, classify, pose or obb; train; and key=value as for `yolo`.")
    ]
    shares: Annotated[str, Meta(description="measured, equal, or relative shares such as 7,2,1.")] = "measured"
    stationary: Annotated[
        bool, Meta(description="Every node keeps to a class-balanced part of the images of its own.")
    ] = False
    elastic: Annotated[
        bool | None,
        Meta(
            description="Go on without nodes that are gone. By default GPUs of one machine exchange directly and begin "
            "again from the last epoch."
        ),
    ] = None
    ship_data: Annotated[bool, Meta(description="On a master's nodes: send the folder of data= to them.")] = False
    home: Home = None
    master: MasterAddress = None
    token: MasterToken = None
    token_file: TokenFile = None
    trusted_only: TrustedOnly = False
    to_stderr: bool = False
    goes_on: bool = False
    started: float = field(default_factory=time.time)
    lost: tuple[Event, ...] = ()
    usual: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        relative_shares(self.shares, self.num_local_nodes)
        batches = [word.partition("=")[2].strip() for word in self.overrides if word.startswith("batch=")]
        if self.memory is not None and batches and is_automatic(batches[-1]):
            raise InvalidInput(
                f"batch={batches[-1]} measures the memory of whole devices: name a number of images with --memory"
            )

    @property
    def elastic_choice(self) -> bool | None:
        """Whether the run goes on without lost nodes; None for the default. Images that stay on a node end with it."""
        return False if self.stationary else self.elastic

    @property
    def names_master(self) -> bool:
        """Whether an option names a master, on whose nodes this trains."""
        said = (self.master, self.home, self.token, self.token_file)
        return self.ship_data or any(one is not None for one in said)


def require_ultralytics() -> None:
    """Raise MissingExtra unless Ultralytics is installed; it is not loaded."""
    if importlib.util.find_spec("ultralytics") is None:
        raise MissingExtra(f"YOLO needs Ultralytics, which is not installed: {pip_install('ultralytics')}")


def read_overrides(overrides: tuple[str, ...]) -> dict[str, str]:
    """Return settings by name, with the task if it is named.

    Raises:
        InvalidInput: an argument is unknown, or does not ask for a training.
        InvalidValue: a setting has a value that nodes cannot share.
    """
    settings: dict[str, str] = {}
    for word in overrides:
        key, separator, value = word.partition("=")
        if separator:
            settings[key.strip()] = value.strip()
        elif word in TASKS:
            settings["task"] = word
        elif word == "resume":
            settings["resume"] = "True"
        elif word == "tune":
            raise InvalidInput("searches have a command of their own: evener tune yolov8n.pt --data coco8.yaml")
        elif word != "train":
            raise InvalidInput(f"{word!r} is neither train, nor one of {', '.join(TASKS)}, nor key=value")
    _refuse(settings)
    return settings


def is_automatic(batch: str) -> bool:
    """Whether the number of images is chosen by the memory of the nodes: -1, or a part of it between 0 and 1."""
    try:
        return batch == "-1" or 0 < float(batch) < 1
    except ValueError:
        return False


def _refuse(settings: dict[str, str]) -> None:
    for key, advice in _REFUSED.items():
        if settings.get(key, "").lower() not in ("", "none", "false") and (key, settings[key]) != ("mode", "train"):
            raise InvalidInput(f"{key}={settings[key]} does not go with Evener: {advice}")
    for key, value in settings.items():
        require(bool(value), key, value, "key=value")
    require(settings.get("task", "detect") in TASKS, "task", settings.get("task"), f"one of {', '.join(TASKS)}")
    batch = settings.get("batch", "16")
    if not (is_automatic(batch) or (batch.isdecimal() and int(batch) > 0)):
        advice = "images of one step over all nodes, -1, or the part of the nodes' memory to use, such as 0.8"
        require(False, "batch", batch, f"a number of {advice}")
    resumes_by_name = settings.get("resume", "False").lower() not in ("true", *_NO_RESUME)
    if "model" not in settings and not resumes_by_name:
        raise InvalidInput("name a model, such as model=yolov8n.pt")


def checkpoint_of(settings: Mapping[str, str]) -> Path | None:
    """Return the checkpoint to resume from; None for a new run. Raises InvalidInput: it is not there."""
    resume = settings.get("resume", "False")
    if resume.lower() in _NO_RESUME:
        return None
    path = Path(settings.get("model", "") if resume.lower() == "true" else resume)
    if not path.is_file():
        raise InvalidInput(f"there is no checkpoint to go on from at {path}: name it by model=PATH/weights/last.pt")
    return path.resolve()


def read_master_overrides(overrides: tuple[str, ...], *, is_agreed: bool) -> dict[str, str]:
    """Read overrides for a master's nodes, which train independently if `is_agreed`. Raises like `read_overrides`."""
    settings = read_overrides(overrides)
    if is_agreed and is_automatic(batch := settings.get("batch", "16")):
        raise InvalidInput(f"batch={batch} does not go with --agreement: nodes train independently; name a number")
    for key, reason in (_NOT_ON_MASTER | (_NOT_AGREED if is_agreed else {})).items():
        value = settings.get(key, "").lower()
        if value not in ("", "none", "false", "0", "-1") and (key, value) != ("pretrained", "true"):
            where = "--agreement" if is_agreed else "a master's nodes"
            raise InvalidInput(f"{key}={settings[key]} does not go with {where}: {reason}")
    return settings


def require_searchable(config: TuneConfig) -> None:
    """Raise InvalidInput if an option of a search does not go with a model of Ultralytics."""
    named = {
        "--thin": config.thin,
        "--metric": config.metric is not None,
        "--precision": config.precision != "fp32",
    }
    if wrong := next((name for name, is_named in named.items() if is_named), None):
        raise InvalidInput(f"{wrong} does not go with a model of Ultralytics, whose trials are ranked by fitness")
    if config.agreement is not None:
        raise InvalidInput(
            "--agreement does not go with a search for settings of Ultralytics, whose trials are ranks that work "
            "together: name the master by --master or --home alone"
        )


def search_overrides(config: TuneConfig, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings of a trial with these `values` as words. Raises InvalidInput."""
    run = RunConfig(
        task=config.task,
        data=config.data,
        option={**config.option, **values},
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=config.seed,
    )
    return yolo_config(run).overrides


def yolo_config(config: RunConfig) -> YoloConfig:
    """Return the same training as overrides of Ultralytics. Raises InvalidInput: an option does not belong to it."""
    known = {one.name for one in fields(YoloConfig)} | {
        "started",
        "usual",
        *_TAKEN,
        *(AGREEMENT_OPTIONS if config.agreement else ()),
        *(MASTER_OPTIONS if config.agreement or config.has_ranks_on_master else ()),
    }
    for one in fields(RunConfig):
        value = getattr(config, one.name)
        if one.name == "resume" and value:
            raise InvalidInput("--resume: go on with evener train PATH/weights/last.pt --option resume=True")
        if one.name not in known and value != (UNSET if one.required else one.default) and value != {}:
            raise InvalidInput(f"{option_name(one.name)} does not go with a model of Ultralytics: leave it out")
    where = None if config.data is None else _URL_AS_PATH.sub(r"\1://", str(config.data))
    named: dict[str, object] = {
        "model": config.task,
        "data": where,
        "batch": config.batch_size,
        "epochs": config.epochs,
    }
    named |= {"seed": config.seed or None, "workers": config.workers or None, "save_dir": config.output}
    overrides = ["train", *(f"{key}={value}" for key, value in named.items() if value is not None)]
    overrides += [f"{key}={value}" for key, value in config.option.items()]
    return YoloConfig(
        overrides=tuple(overrides),
        shares=config.shares,
        stationary=config.stationary,
        elastic=config.elastic,
        trusted_only=config.trusted_only,
        started=config.started,
        usual=config.usual,
        **{one.name: getattr(config, one.name) for one in fields(NodesConfig)},
    )


def run_config(config: YoloConfig, **agreement: Any) -> RunConfig:
    """Return the same training as options of `evener train`.

    Args:
        config: of the training.
        agreement: options of nodes that train by themselves, such as `local_steps`; none for ranks.

    Raises:
        InvalidInput: as from `read_master_overrides`, or an option does not go with the others.
    """
    overrides = read_master_overrides(config.overrides, is_agreed=bool(agreement))
    data = overrides.pop("data", None)
    same = {one.name for one in fields(RunConfig)} & {one.name for one in fields(YoloConfig)}
    return RunConfig(
        task=overrides.pop("model"),
        data=None if data is None else Path(data),
        option=overrides,
        **agreement,
        **{name: getattr(config, name) for name in same},
    )
