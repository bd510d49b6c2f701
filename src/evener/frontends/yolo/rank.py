"""What a rank of a training of Ultralytics runs, from joining the others to the record."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.benchmark.device import environment
from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.frontends.yolo.masters_checkpoints import MastersCheckpoints
from evener.frontends.yolo.run_folder import own_folder
from evener.frontends.yolo.seat import Seat
from evener.frontends.yolo.words import YoloConfig
from evener.launch.left_out import stay
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import NotNeeded
from evener.records.plan import Plan
from evener.records.record import NodeSummary, TrainRecord
from evener.training.context import join_world
from evener.training.elastic.start import late_group
from evener.training.rank import left_out, node_summaries

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def yolo_rank(env: RankEnvironment, config: YoloConfig, checkpoints: MastersCheckpoints | None = None) -> None:
    """One rank's whole way; the leader emits plan, batches and record through the env.

    Args:
        env: of the rank.
        config: what is asked for; that of the first rank counts, unless files have other places here.
        checkpoints: that the rank's master keeps; None: there is no master.
    """
    with contextlib.redirect_stdout(sys.stderr) if config.to_stderr else contextlib.nullcontext():
        group, left = join(env, preflight=config.preflight)
        if left is None and not env.has_own_paths:
            config = msgspec.json.decode(group.all_gather_bytes(msgspec.json.encode(config))[0], type=YoloConfig)
        with alone():
            plan, takes_part = _train(env, group, config, left, checkpoints)
        if not takes_part:
            stay(env, plan)
            return
        leave_group()


def join(env: RankEnvironment, *, preflight: bool = True) -> tuple[Group, Plan | None]:
    """All ranks; or this one alone, and the plan of the run, if that has begun without it."""
    if env.line is not None and env.line.is_late:
        group, left = late_group(env)
        return group, left.plan
    return join_world(env, preflight=preflight), None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, Ultralytics finds nothing of other processes in the environment: to itself each rank is alone."""
    kept = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _train(
    env: RankEnvironment, group: Group, config: YoloConfig, left: Plan | None, checkpoints: MastersCheckpoints | None
) -> tuple[Plan, bool]:
    """From the words to the record; the plan, and whether this rank is in it.

    Args:
        env, group, config, checkpoints: of the rank.
        left: the plan of a run that has begun without this rank, which raises NotNeeded where that goes on without it.
    """
    from evener.frontends.yolo.settings import read_training
    from evener.frontends.yolo.trainer import even_trainer

    seat = Seat(env, group, config.shares, is_stationary=config.stationary, left=left, checkpoints=checkpoints)
    if not group.is_leader or seat.is_late:
        logging.getLogger("ultralytics").setLevel(logging.ERROR)
    model, settings, folder = read_training(config.words)
    with own_folder(group, folder, is_first_here=seat.is_first_here, is_late=seat.is_late) as own:
        seat.folder = folder
        begin = time.time()
        settings |= {"save_dir": str(own), "device": _device(env)}
        try:
            model.train(trainer=even_trainer(model._smart_load("trainer"), seat), **settings)
        except NotNeeded:
            if left is not None or seat.work.plan is None:
                raise
            return seat.work.plan, False  # it says why; the others go on
        seat.leave(model.trainer)
    assert seat.work.plan is not None
    seat.work.history.wall_seconds = time.time() - begin
    seat.work.history.events[:0] = [*left_out(seat.work.plan), *config.lost]
    record = _record(seat, model, begin - config.started)
    if group.is_leader:
        env.notify(record)
    seat.together(group.barrier)
    return seat.work.plan, True


def _device(env: RankEnvironment) -> str:
    """As Ultralytics names it."""
    return str(env.device.index or 0) if env.device.type == "cuda" else env.device.type


def _record(seat: Seat, model: Any, startup: float) -> TrainRecord:
    """The record of the run; all ranks call this."""
    history, plan, args = seat.work.history, seat.work.plan, model.trainer.args
    assert plan is not None
    nodes = seat.together(lambda: msgspec.to_builtins(list(node_summaries(seat.group, plan, history))))
    return history.record(
        msgspec.convert(nodes, list[NodeSummary]),
        task=f"{args.task} {Path(args.model).name}",
        plan=plan,
        seed=args.seed,
        epochs=args.epochs,
        precision="fp16" if model.trainer.amp else "fp32",
        seconds=history.wall_seconds,
        startup_seconds=startup,
        environment=environment(),
    )
