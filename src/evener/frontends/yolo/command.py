"""`evener yolo`, and `evener train` of a model of Ultralytics: from the options to the output.

Ultralytics runs code that lies in files when it loads them:

    model.pt              a pickle: loading it may run whatever its author wanted
    model.yaml            `activation:` is evaluated as Python
    data.yaml             `download:` is run as Python, or by a shell, where the images are missing

Evener warns of such files once. `--trusted-only` refuses them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml

from evener.commands.train import end_torchrun_rank, is_torchrun, run_on_nodes, run_torchrun_rank
from evener.config.run_config import RunConfig
from evener.data.tasks.load import needing_extras
from evener.frontends.yolo.overrides import (
    YoloConfig,
    read_master_overrides,
    read_overrides,
    require_ultralytics,
    run_config,
    yolo_config,
)
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.launch.nodes import options_of
from evener.launch.rank_environment import RankFunction
from evener.records.errors import InvalidInput, MissingExtra, TrainingFailed, first_line
from evener.records.events import RunEvent
from evener.records.record import Event, TrainRecord
from evener.report.html import write_page
from evener.report.tables import summary
from evener.training.console import RunView, print_line, run_folder
from evener.training.partial_record import RunRequest

SAFE_LOAD = "ULTRALYTICS_SAFE_LOAD"
"""Environment variable by which Ultralytics (8.4 and later) loads known classes of a .pt alone."""
_PICKLES = (".pt", ".pth")
_MODELS = ("model", "resume", "pretrained")
_ARCHIVE = re.compile(r"https?://[^\s'\"]+")
_YAML = (".yaml", ".yml")
_SCALE, _SCALE_P6 = re.compile(r"(\d+)[nslmx](.+)?$"), re.compile(r"(\d+[nslmx])6(.+)?$")


def what_runs(settings: Mapping[str, str]) -> list[str]:
    """Describe the settings that name files which run as programs; names of Ultralytics' own models do not count.

    Args:
        settings: by name.
    """
    pickles = [f"{key}={settings[key]}" for key in _MODELS if _is_file(settings.get(key, ""), _PICKLES)]
    return [*pickles, *what_is_evaluated(settings)]


def what_is_evaluated(settings: Mapping[str, str]) -> list[str]:
    """Describe the settings of `what_runs` that are no pickles."""
    names = [
        f"{key}={settings[key]}, which comes from another machine,"
        for key, suffixes in (("model", _YAML), ("data", None))
        if _is_remote(settings.get(key, ""), suffixes)
    ]
    if any("activation" in _content(file) for file in _model_files(settings.get("model", ""))):
        names.append(f"`activation:` in model={settings['model']}")
    if _is_file(settings.get("data", ""), _YAML):
        download = _content(settings["data"]).get("download")
        if download and not (isinstance(download, str) and _ARCHIVE.fullmatch(download.strip())):
            names.append(f"`download:` in data={settings['data']}")
    if settings.get("cfg", "").lower() not in ("", "none"):
        names.append(f"cfg={settings['cfg']}, which may name others")
    return names


def warning_of(settings: Mapping[str, str]) -> str:
    """Return the warning about files that run as programs; empty if there are none."""
    names = what_runs(settings)
    if not names:
        return ""
    verb = "runs" if len(names) == 1 else "run"
    return (
        f"warning: {', '.join(names)} {verb} as a program when Ultralytics loads it: "
        "use files of people whom you trust, or say --trusted-only"
    )


def refuse_programs(settings: Mapping[str, str]) -> None:
    """Have nothing run that came with a file, from now on in this process and those that it starts.

    Args:
        settings: by name.

    Raises:
        InvalidInput: a file cannot be loaded without; names it.
    """
    names = what_is_evaluated(settings)
    if not names and (pickles := what_runs(settings)) and not _loads_safely():
        names = pickles
    if names:
        raise InvalidInput(f"--trusted-only: {', '.join(names)} would run as a program; leave it out")
    os.environ[SAFE_LOAD] = "1"


def _loads_safely() -> bool:
    """Whether the Ultralytics that is installed can load known classes alone."""
    os.environ[SAFE_LOAD] = "1"  # which it reads when it is imported
    try:
        from ultralytics.nn import tasks
    except ImportError:
        return False
    safe: Any = getattr(tasks, "_SafeLoad", None)
    return safe is not None and bool(safe.SUPPORTED and safe.restricted())


def _is_file(value: str, suffixes: tuple[str, ...]) -> bool:
    path = Path(_without_query(value))
    return path.suffix.lower() in suffixes and (path.is_file() or "://" in value)


def _is_remote(value: str, suffixes: tuple[str, ...] | None) -> bool:
    """Whether Ultralytics downloads this file, and its name ends so; None for any name."""
    return "://" in value and (suffixes is None or Path(_without_query(value)).suffix.lower() in suffixes)


def _model_files(value: str) -> list[str]:
    """Return the descriptions of models that Ultralytics may read for `value`: for yolo8n.yaml also yolo8.yaml."""
    named = (value.strip(), _SCALE_P6.sub(r"\1-p6\2", value.strip()))
    without_scale = (_SCALE.sub(r"\1\2", name) for name in named)
    return [one for one in dict.fromkeys((*named, *without_scale)) if _is_file(one, _YAML)]


def _without_query(value: str) -> str:
    """Return a path or an address as Ultralytics takes it."""
    return value.strip().partition("?")[0] if "://" in value else value.strip()


def _content(value: str) -> dict[str, object]:
    """Return the settings of a file; empty if it cannot be read or holds none, which Ultralytics reports itself."""
    try:
        content = yaml.safe_load(Path(value.strip()).read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


LICENCE = (
    "Ultralytics is under the AGPL-3.0, and so is what is made with it, models included, "
    "unless you have another licence of theirs: https://ultralytics.com/license"
)


def train(config: RunConfig, *, as_json: bool) -> None:
    """`evener train` of a model of Ultralytics."""
    if config.agreement is None and not config.has_ranks_on_master:
        run(yolo_config(config), as_json=as_json)
        return
    overrides = read_master_overrides(yolo_config(config).overrides, is_agreed=config.agreement is not None)
    require_trust(overrides, trusted_only=config.trusted_only)
    if config.agreement:
        from evener.frontends.yolo.master_run import train_yolo_by_agreement as train_there
    else:
        from evener.frontends.yolo.master_run import train_yolo_as_ranks as train_there

    record = train_there(config, as_json=as_json, licence=LICENCE)
    if as_json:
        print_line(json.dumps(summary(record)))


def run(config: YoloConfig, *, as_json: bool) -> None:
    """`evener yolo`: as a rank if torchrun started this process, on a master's nodes, or on nodes of this machine.

    Raises:
        MissingExtra: Ultralytics is not installed.
        InvalidInput: the options cannot be combined, or a setting is not supported.
    """
    if config.names_master:
        train(run_config(config), as_json=as_json)
        return
    require_trust(read_overrides(config.overrides), trusted_only=config.trusted_only)
    config = msgspec.structs.replace(config, to_stderr=as_json)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        perform = as_rank if is_torchrun(config) else on_local_nodes
        record = perform(config, yolo_rank, _folder_of)
    if as_json and record is not None:
        print_line(json.dumps(summary(record)))
    if is_torchrun(config):
        end_torchrun_rank()


def require_trust(overrides: Mapping[str, str], *, trusted_only: bool) -> None:
    """Refuse files that run as programs, or warn the user of them, and require Ultralytics. Raises InvalidInput."""
    require_loadable()
    if trusted_only:
        refuse_programs(overrides)
    elif os.environ.get("RANK", "0") == "0" and (sentence := warning_of(overrides)):
        sys.stderr.write(f"evener: {sentence}\n")


def require_loadable() -> None:
    """Raise MissingExtra unless Ultralytics and the torchvision that it needs are there, and load."""
    require_ultralytics()
    with needing_extras():
        try:
            import torchvision  # noqa: F401
        except (RuntimeError, OSError) as error:
            raise MissingExtra(
                f"torchvision is installed but does not load ({first_line(error)}): install a torchvision that was "
                "built for this PyTorch, see https://pytorch.org/get-started/locally"
            ) from error


def on_local_nodes(config: YoloConfig, program: RankFunction, folder_of: Callable[[YoloConfig], Path]) -> TrainRecord:
    """Run `program` on nodes of this machine, show the run, and keep its record in its folder."""
    is_elastic = config.elastic_choice is not False
    return _shown(config, folder_of(config), partial(run_on_nodes, program, is_elastic=is_elastic, without=without))


def as_rank(config: YoloConfig, program: RankFunction, folder_of: Callable[[YoloConfig], Path]) -> TrainRecord | None:
    """Run `program` as one rank of torchrun; the first rank shows the run, and keeps its record in its folder."""
    perform = partial(run_torchrun_rank, program)
    if os.environ["RANK"] == "0":
        return _shown(config, folder_of(config), perform)
    perform(config, lambda _: None)
    return None


def _shown(
    config: YoloConfig, folder: Path, perform: Callable[[YoloConfig, Callable[[RunEvent], None]], None]
) -> TrainRecord:
    overrides = (*(word for word in config.overrides if not word.startswith("save_dir=")), f"save_dir={folder}")
    settings = read_overrides(config.overrides)
    options = {"--shares": config.shares, "--stationary": "yes" if config.stationary else ""}
    options |= {"workers": settings.get("workers", "8"), "batch": settings.get("batch", "16")}
    model = Path(settings.get("model", "")).name
    request = RunRequest(folder.name, usual=config.usual, options=options, file=model)
    with RunView(run_folder(folder), to_stderr=config.to_stderr, shows_steps=False, request=request) as view:
        view.console.print(LICENCE)
        perform(msgspec.structs.replace(config, overrides=overrides), view)
    if view.record is None:
        raise TrainingFailed("the run ended without a record")
    write_page(folder / "report.html", {folder.name: view.record}, title=f"YOLO: {folder.name}")
    return view.record


def _folder_of(config: YoloConfig) -> Path:
    with alone():
        from evener.frontends.yolo.settings import read_training

        return read_training(config.overrides).folder


def without(config: YoloConfig, remaining: Sequence[int], lost: Event) -> YoloConfig | None:
    """Return the config with which the remaining nodes restart from the last epoch; None if they cannot go on.

    Ultralytics' loop cannot be left in the middle of a batch, and its last checkpoint holds all that it needs.

    Args:
        config: of all nodes, with the folder of the results.
        remaining: positions of the remaining nodes among all.
        lost: the event that names the lost nodes.
    """
    options = options_of(remaining, shares=config.shares, local_nodes=config.local_nodes, memory=config.memory)
    if config.elastic_choice is False or options is None:
        return None
    overrides = config.overrides
    folder = read_overrides(overrides)["save_dir"]
    last = Path(folder) / "weights" / "last.pt"
    if last.is_file():
        if is_complete(last):
            return None
        overrides = ("train", f"resume={last}", f"save_dir={folder}")
    return msgspec.structs.replace(config, overrides=overrides, lost=(*config.lost, lost), **options)


def is_complete(checkpoint: Path) -> bool:
    """Whether all epochs are over, so that Ultralytics has removed the training state from the checkpoint."""
    return bool(torch.load(checkpoint, map_location="cpu", weights_only=False)["epoch"] < 0)
