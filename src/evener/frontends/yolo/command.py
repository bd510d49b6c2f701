"""`evener yolo`, and `evener train` of a model of Ultralytics: from what is asked for to what is printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from evener.commands.train import is_torchrun, launch, torchrun_env
from evener.config.run_config import RunConfig
from evener.data.tasks.load import needing_extras
from evener.frontends.yolo.rank import alone, yolo_rank
from evener.frontends.yolo.trusted_files import refuse_programs, warning_of
from evener.frontends.yolo.words import (
    YoloConfig,
    read_masters_words,
    read_words,
    require_ultralytics,
    run_config,
    yolo_config,
)
from evener.launch.rank_environment import run_rank
from evener.records.errors import MissingExtra, TrainingFailed, first_line
from evener.records.events import RunEvent
from evener.records.record import Event, TrainRecord
from evener.report.html import write_page
from evener.report.tables import summary
from evener.system.signals import STOP_SIGNALS
from evener.training.console import RunView, print_line, run_folder
from evener.training.unfinished import Asked

LICENCE = (
    "Ultralytics is under the AGPL-3.0, and so is what is made with it, models included, "
    "unless you have another licence of theirs: https://ultralytics.com/license"
)


def train(config: RunConfig, *, as_json: bool) -> None:
    """`evener train` of a model of Ultralytics."""
    if config.agreement is None and not config.is_on_master:
        run(yolo_config(config), as_json=as_json)
        return
    words = read_masters_words(yolo_config(config).words, is_agreed=config.agreement is not None)
    _require_ultralytics()
    _warn(words)
    if config.agreement:
        from evener.frontends.yolo.local_run import train_on_nodes as train_on_master
    else:
        from evener.frontends.yolo.master_run import train_together as train_on_master

    record = train_on_master(config, as_json=as_json, licence=LICENCE)
    if as_json:
        print_line(json.dumps(summary(record)))


def run(config: YoloConfig, *, as_json: bool) -> None:
    """`evener yolo`: as a rank if torchrun started this process, on a master's nodes, or on nodes of this machine.

    Raises:
        MissingExtra: Ultralytics is not installed.
        InvalidInput: what is asked for cannot be done.
    """
    if config.names_master:
        if config.trusted_only:
            refuse_programs(read_words(config.words))
        train(run_config(config), as_json=as_json)
        return
    words = read_words(config.words)
    _require_ultralytics()
    if config.trusted_only:
        refuse_programs(words)
    elif os.environ.get("RANK", "0") == "0":
        _warn(words)
    config = msgspec.structs.replace(config, to_stderr=as_json)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        record = _as_rank(config) if is_torchrun(config) else _on_local_nodes(config)
    if as_json and record is not None:
        print_line(json.dumps(summary(record)))


def _warn(words: Mapping[str, str]) -> None:
    """Tell the user of files that run as programs."""
    if sentence := warning_of(words):
        sys.stderr.write(f"evener: {sentence}\n")


def _require_ultralytics() -> None:
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


def _on_local_nodes(config: YoloConfig) -> TrainRecord | None:
    is_elastic = config.elastic and not config.stationary
    return _shown(config, partial(launch, yolo_rank, is_elastic=is_elastic, without=_without))


def _without(config: YoloConfig, kept: Sequence[int], event: Event) -> YoloConfig | None:
    from evener.frontends.yolo.going_on import without

    return without(config, kept, event)


def _as_rank(config: YoloConfig) -> TrainRecord | None:
    """One rank of torchrun's; the first one shows the run."""

    def perform(config: YoloConfig, show: Callable[[RunEvent], None]) -> None:
        env = torchrun_env(config.patience, show)
        if isinstance(show, RunView):
            env.end = show.end_process
        env.stop_on(*STOP_SIGNALS)
        run_rank(env, yolo_rank, config)

    if os.environ["RANK"] == "0":
        return _shown(config, perform)
    perform(config, lambda _: None)
    return None


def _shown(config: YoloConfig, perform: Callable[[YoloConfig, Callable[[RunEvent], None]], None]) -> TrainRecord:
    """The record of a run that `perform` performs, shown and kept in the folder that Ultralytics chooses."""
    folder = _folder_of(config)
    words = (*(word for word in config.words if not word.startswith("save_dir=")), f"save_dir={folder}")
    settings = read_words(config.words)
    options = {"--shares": config.shares, "--stationary": "yes" if config.stationary else ""}
    options |= {"workers": settings.get("workers", "8"), "batch": settings.get("batch", "16")}
    model = Path(settings.get("model", "")).name
    asked = Asked(folder.name, usual=config.usual, options=options, file=model)
    with RunView(run_folder(folder), to_stderr=config.to_stderr, shows_steps=False, asked=asked) as view:
        view.console.print(LICENCE)
        perform(msgspec.structs.replace(config, words=words), view)
    if view.record is None:
        raise TrainingFailed("the run ended without a record")
    write_page(folder / "report.html", {folder.name: view.record}, title=f"YOLO: {folder.name}")
    return view.record


def _folder_of(config: YoloConfig) -> Path:
    with alone():
        from evener.frontends.yolo.settings import read_training

        return read_training(config.words).folder
