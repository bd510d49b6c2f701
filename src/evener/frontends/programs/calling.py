"""`evener train` on the command line, and `evener.train` in Python or a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import FieldInfo, fields, replace
from safetensors.torch import load_file
from torch import nn

from evener.commands import train as commands
from evener.commands.pickled import with_pickled_task
from evener.config.config_file import usual_options
from evener.config.conflicts import AGREEMENT_OPTIONS, MASTER_OPTIONS, option_name
from evener.config.option_values import description_of, field_value
from evener.config.run_config import RunConfig
from evener.data.loader import random_state_kept
from evener.data.tasks.load import load_any_task, task_of
from evener.frontends.programs.batch_training import refuse_batches, train_batches
from evener.launch.rank_environment import RankFunction
from evener.launch.slurm import adopt_slurm
from evener.parallel.op_registry import without_synchronised
from evener.records.errors import InvalidInput, nearest
from evener.records.record import WEIGHTS, TrainRecord
from evener.records.task import BatchTask, Task
from evener.report.scalars import ScalarLogger
from evener.training.callbacks import Callback, watched
from evener.training.checkpoint_folder import require_checkpoint
from evener.training.console import print_line
from evener.training.context import Arithmetic, read_plan
from evener.training.rank import train_rank

_MASTER_OPTIONS = (*AGREEMENT_OPTIONS, *MASTER_OPTIONS)


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
        model: with the trained weights, on the CPU.
        record: of the run.
    """

    model: nn.Module
    record: TrainRecord


def train(
    task: Task | BatchTask | Callable[..., Task | BatchTask] | str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[ScalarLogger] = (),
    quiet: bool = False,
    **options: Any,
) -> Trained:
    """Train `task` on nodes of this machine, as `evener train` does.

        model, record = evener.train(task, local_nodes="1.0,0.5", epochs=3)

    Args:
        task: a Task or BatchTask, or a function that returns one, also from a notebook; or the name of a built-in task
            or the path of a task file, as for `evener train`.
        callbacks: functions that are called in this process with every Plan, Step, Validation, Epoch, Event and
            TrainRecord. A true value returned for an Epoch ends the run.
        loggers: receive loss, accuracy, metrics and speed.
        quiet: print nothing.
        options: those of `evener train`, with underscores; `local_nodes` may be a list of speeds.

    Raises:
        InvalidInput: an option or the task is invalid.
        EvenerError: the run fails, as `evener train` does.
    """
    is_named = isinstance(task, str | Path)
    config = _config_of(str(task) if is_named else None, options)
    if config.usual and not quiet:
        print_line(f"options: {config.usual}")
    made = (
        load_any_task(str(task), config.data, config.option) if is_named else task_of(task, config.data, config.option)
    )
    config = config if is_named else replace(config, task=made.name)
    _refuse(made, config)
    config = _with_all_nodes(made, config)
    with watched(callbacks, loggers) as watch, random_state_kept():
        record = commands.perform(config, program=_program(made, config, is_named), watch=watch, quiet=quiet)
        return Trained(_trained_model(made, config), record)


def train_command(config: RunConfig, *, as_json: bool) -> None:
    """`evener train`: on this machine's nodes, or as a rank of torchrun."""
    task = load_any_task(config.task, config.data, config.option)
    if not commands.is_torchrun(config):
        _refuse(task, config)
    elif isinstance(task, BatchTask):
        refuse_batches(config)  # on every rank; ranks find out together about the rest
    commands.train(_with_all_nodes(task, config), _program_for(task), as_json=as_json)


def _program_for(task: Task | BatchTask) -> Any:
    """Return the function that a rank runs with its environment, the config and, unless named, the task."""
    return train_batches if isinstance(task, BatchTask) else train_rank


def _refuse(task: Task | BatchTask, config: RunConfig) -> None:
    """Raise InvalidInput, before anything starts, for options that `task` does not support."""
    config.sizes_of(task, read_plan(config))
    if config.resume:
        require_checkpoint(config.checkpoint_folder)
    if isinstance(task, BatchTask):
        refuse_batches(config)


def _with_all_nodes(task: Task | BatchTask, config: RunConfig) -> RunConfig:
    """Return `config`; a BatchTask cannot lose nodes, so `elastic` is off."""
    return replace(config, elastic=False) if isinstance(task, BatchTask) else config


def _program(task: Task | BatchTask, config: RunConfig, is_named: bool) -> RankFunction:
    """Return the function that a rank runs; it loads a named task itself."""
    program = _program_for(task)
    if config.local_nodes is None and len(commands.choose_nodes(config)) == 1:
        return partial(program, task=task)
    sendable: RankFunction = program if is_named else with_pickled_task(program, task)
    return sendable


def _config_of(task: str | None, options: Mapping[str, Any]) -> RunConfig:
    """Return the config of the given options and, for a named task, of the file beside it. Raises InvalidInput."""
    adopt_slurm(os.environ)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise InvalidInput("evener.train starts its nodes itself: under torchrun use evener.join(), or `evener train`")
    known = {one.name: one for one in fields(RunConfig) if description_of(one) and not one.required}
    for name in options:
        if name in _MASTER_OPTIONS:
            raise InvalidInput(f"evener.train takes no {name}: a master's nodes are for `evener train --agreement`")
        if name not in known:
            raise InvalidInput(f"evener.train has no option {name!r}{nearest(name, set(known) - set(_MASTER_OPTIONS))}")
    values = {name: _option(known[name], value) for name, value in options.items()}
    if task is None:
        return RunConfig(task="task", **values)
    with usual_options({"option": {}, **values, "task": task}, values) as config:
        for name in _MASTER_OPTIONS:
            if name in config:
                raise InvalidInput(f"{option_name(name)}: a master's nodes are for `evener train --agreement`")
        return RunConfig(**config)


def _option(one: FieldInfo, value: Any) -> Any:
    try:
        return field_value(one, value)
    except InvalidInput as error:
        raise InvalidInput(f"evener.train: {error}") from error


def _trained_model(task: Task | BatchTask, config: RunConfig) -> nn.Module:
    """The task's model with the weights that the run wrote."""
    model = without_synchronised(task.model())
    Arithmetic(config.precision, torch.device("cpu")).prepare_model(model)
    model.load_state_dict(load_file(config.folder / WEIGHTS))
    return model
