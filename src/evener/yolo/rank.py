"""What a rank of a training of Ultralytics runs, from joining the others to the record."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from evener.benchmark.device import environment
from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.launch.rank_environment import RankEnvironment
from evener.record import TrainRecord
from evener.run.context import join_world
from evener.run.rank import node_summaries
from evener.yolo.seat import Seat
from evener.yolo.words import YoloConfig

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def yolo_rank(env: RankEnvironment, config: YoloConfig) -> None:
    """One rank's whole way; the leader emits plan, batches and record through the env."""
    with contextlib.redirect_stdout(sys.stderr) if config.to_stderr else contextlib.nullcontext():
        group = join_world(env, preflight=config.preflight)
        config = msgspec.json.decode(group.all_gather_bytes(msgspec.json.encode(config))[0], type=YoloConfig)
        with alone():
            _train(env, group, config)
        group.barrier()
        leave_group()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, Ultralytics finds nothing of other processes in the environment: to itself each rank is alone."""
    kept = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _train(env: RankEnvironment, group: Group, config: YoloConfig) -> None:
    from evener.yolo.settings import read_training
    from evener.yolo.trainer import even_trainer

    if not group.is_leader:
        logging.getLogger("ultralytics").setLevel(logging.ERROR)
    model, settings, _ = read_training(config.words)
    seat = Seat(env, group, config.shares, is_stationary=config.stationary)
    with _folder(seat.keeps_files, settings["save_dir"]) as folder:
        settings |= {"save_dir": folder, "device": _device(env)}
        begin = time.time()
        model.train(trainer=even_trainer(model._smart_load("trainer"), seat), **settings)
    seat.history.wall_seconds = time.time() - begin
    seat.history.events[:0] = config.lost
    record = _record(seat, model, begin - config.started)
    if group.is_leader:
        env.notify(record)


@contextlib.contextmanager
def _folder(keeps_files: bool, save_dir: str) -> Iterator[str]:
    """Where a rank writes: the folder of the run, or one that is gone afterwards."""
    if keeps_files:
        yield save_dir
        return
    with tempfile.TemporaryDirectory(prefix="evener-yolo-") as folder:
        yield folder


def _device(env: RankEnvironment) -> str:
    """As Ultralytics names it."""
    return str(env.device.index or 0) if env.device.type == "cuda" else env.device.type


def _record(seat: Seat, model: Any, startup: float) -> TrainRecord:
    """The record of the run; all ranks call this."""
    history, plan, args = seat.history, seat.plan, model.trainer.args
    assert plan is not None
    return history.record(
        list(node_summaries(seat.group, plan, history)),
        task=f"{args.task} {args.model}",
        plan=plan,
        seed=args.seed,
        epochs=args.epochs,
        precision="fp16" if model.trainer.amp else "fp32",
        seconds=history.wall_seconds,
        startup_seconds=startup,
        environment=environment(),
    )
