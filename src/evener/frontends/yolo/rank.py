"""One rank of a training of Ultralytics, from joining the others to the record."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.remote_checkpoints import RemoteCheckpoints
from evener.frontends.yolo.run_folder import own_folder
from evener.frontends.yolo.trainer_rank import TrainerRank
from evener.launch.rank_environment import RankEnvironment
from evener.launch.unused_rank import stay
from evener.records.decoding import convert, decode_json
from evener.records.errors import NotNeeded
from evener.records.plan import Plan
from evener.records.record import NodeSummary
from evener.training.context import abandonable_backend, join_world
from evener.training.elastic.start import late_group

if TYPE_CHECKING:
    from evener.frontends.yolo.searched_trial import SearchedTrial
    from evener.frontends.yolo.settings import YoloTraining

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def _read(config: YoloConfig) -> YoloTraining:
    """Return the training that the overrides of `config` describe."""
    from evener.frontends.yolo.settings import read_training

    return read_training(config.overrides)


def yolo_rank(
    env: RankEnvironment,
    config: YoloConfig,
    checkpoints: RemoteCheckpoints | None = None,
    read: Callable[[YoloConfig], YoloTraining] = _read,
    trial: SearchedTrial | None = None,
) -> None:
    """Run one rank; the leader emits plan, batches and record through the env.

    Args:
        env: of the rank.
        config: options; those of the first rank count, unless paths differ on this machine.
        checkpoints: kept by the rank's master; None without a master.
        read: returns the training that the options describe.
        trial: of a search; None for any other training.
    """
    with contextlib.redirect_stdout(sys.stderr) if config.to_stderr else contextlib.nullcontext():
        group, late_plan = join(env, config.elastic_choice, preflight=config.preflight)
        if late_plan is None and not env.has_own_paths:
            config = decode_json(group.all_gather_bytes(msgspec.json.encode(config))[0], YoloConfig)
        with alone():
            plan, takes_part = _train(env, group, config, late_plan, checkpoints, read, trial)
        if not takes_part:
            stay(env, plan)
            return
        leave_group()


def join(env: RankEnvironment, is_elastic: bool | None, *, preflight: bool = True) -> tuple[Group, Plan | None]:
    """Return all ranks; or this one alone, and the plan of the run, if that has begun without it."""
    if env.control is not None and env.control.is_late:
        group, published = late_group(env)
        return group, published.plan
    return join_world(env, abandonable_backend(env, is_elastic), preflight=preflight), None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, Ultralytics finds nothing of other processes in the environment: to itself each rank is alone."""
    removed = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


def _train(
    env: RankEnvironment,
    group: Group,
    config: YoloConfig,
    late_plan: Plan | None,
    checkpoints: RemoteCheckpoints | None,
    read: Callable[[YoloConfig], YoloTraining],
    trial: SearchedTrial | None,
) -> tuple[Plan, bool]:
    """From the words to the record; the plan, and whether this rank is in it.

    Args:
        env, group, config, checkpoints, read, trial: of the rank.
        late_plan: the plan of a run that has begun without this rank, which raises NotNeeded if that continues alone.
    """
    from ultralytics.engine.model import Model

    from evener.frontends.yolo.trainer import distributed_trainer

    trainer_rank = TrainerRank(
        env,
        group,
        config.shares,
        is_stationary=config.stationary,
        late_plan=late_plan,
        checkpoints=checkpoints,
        goes_on=config.goes_on,
        trial=trial,
    )
    if not group.is_leader or trainer_rank.is_late:
        logging.getLogger("ultralytics").setLevel(logging.ERROR)
    model, settings, folder, own_trainer = read(config)
    with own_folder(
        group, folder, is_first_here=trainer_rank.is_first_here, is_late=trainer_rank.is_late
    ) as rank_folder:
        trainer_rank.folder = folder
        trainer_rank.run_name = folder.name if checkpoints is None else settings.get("name", "")
        settings |= {"save_dir": str(rank_folder), "device": _device(env)}
        trainer = distributed_trainer(own_trainer or model._smart_load("trainer"), trainer_rank)
        try:
            Model.train(model, trainer=trainer, **settings)
        except NotNeeded:
            if late_plan is not None or trainer_rank.work.plan is None:
                raise
            return trainer_rank.work.plan, False  # it says why; the others go on
        trainer_rank.leave(model.trainer)
    assert trainer_rank.work.plan is not None
    session, args = trainer_rank.work.session, model.trainer.args
    nodes = trainer_rank.together(lambda: msgspec.to_builtins(session.summaries()))
    session.history.events[:0] = config.lost
    record = session.record(
        config.started,
        convert(nodes, list[NodeSummary]),
        task=f"{args.task} {Path(args.model).name}",
        seed=args.seed,
        epochs=args.epochs,
        precision="fp16" if model.trainer.amp else "fp32",
    )
    if group.is_leader:
        env.notify(record)
    trainer_rank.together(group.barrier)
    return trainer_rank.work.plan, True


def _device(env: RankEnvironment) -> str:
    """Return the device as Ultralytics names it."""
    if env.device.type in ("cpu", "mps"):
        return env.device.type
    return str(env.device)
