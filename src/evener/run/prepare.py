"""A rank's material before it knows its share: model, data, and how long the one takes for the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from evener.benchmark.task_timing import affine, time_task
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.data.loader import collect, seed_all, split_batch, to_device
from evener.errors import require
from evener.launch.rank_environment import RankEnvironment
from evener.memory import usable_memory
from evener.profile import TaskTiming
from evener.run.precision import Arithmetic
from evener.run.settings import Settings
from evener.task import Task
from evener.tracer.nested import call

_MEASURE_SECONDS = 1.5
_CALIBRATION_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Work:
    """A rank's material before it knows its share."""

    task: Task
    settings: Settings
    arithmetic: Arithmetic
    model: nn.Module
    train_data: Dataset[Any]
    validation_data: Dataset[Any] | None
    make_optimizer: Callable[[Any], Optimizer]


def prepare(task: Task, settings: Settings, seat: RankEnvironment, *, on_device: bool = True) -> Work:
    """Make the model (its weights follow the seed) and the data.

    Args:
        task: what is to be trained.
        settings: of the run.
        seat: of this rank.
        on_device: whether the whole model goes onto the rank's device; else it stays in the host's memory.

    Raises:
        InvalidValue: the batch exceeds the data.
    """
    arithmetic = Arithmetic(settings.precision, seat.device)
    train_data = task.train_data()
    count = len(train_data)  # type: ignore[arg-type]
    require(count > 0, "training samples", count, "at least one")
    require(settings.batch_size <= count, "--batch-size", settings.batch_size, f"at most the {count} training samples")
    seed_all(settings.seed)
    return Work(
        task=task,
        settings=settings,
        arithmetic=arithmetic,
        model=arithmetic.prepare_model(task.model(), on_device),
        train_data=train_data,
        validation_data=task.validation_data() if task.validation_data else None,
        make_optimizer=task.optimizer or (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)),
    )


def calibrate(work: Work, world: Group, seat: RankEnvironment, micro: int) -> None:
    """Let every slowed local node find out, one after the other, what a step takes it at full speed, undisturbed."""
    for rank, node in enumerate(seat.nodes):
        if min(speed for _, speed in node.speeds) == 1.0:
            continue
        if rank == seat.rank:
            alone = affine(_time(work, seat, micro, speed=1.0, seconds=_CALIBRATION_SECONDS))
            world.timer.pace.reference = partial(_step_seconds, *alone, work.settings.accumulate)
        world.barrier()


def _step_seconds(fixed: float, each: float, accumulate: int, samples: int) -> float:
    return accumulate * fixed + samples * each


def measure(work: Work, world: Group, seat: RankEnvironment, micro: int) -> TaskTiming:
    """How long this rank takes for batches of the run's own samples, all ranks measuring at the same time."""
    world.barrier()
    return _time(work, seat, micro, speed=world.timer.pace.speed, seconds=_MEASURE_SECONDS)


def _time(work: Work, seat: RankEnvironment, micro: int, *, speed: float, seconds: float) -> TaskTiming:
    def loss_step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        with work.arithmetic.autocast():
            outputs = call(model, work.arithmetic.prepare(inputs))
            return work.task.loss(outputs, work.arithmetic.prepare(targets))

    def fetch(samples: int) -> Any:
        return to_device(samples_of(work, samples), seat.device)

    return time_task(
        task=work.task,
        model=work.model,
        make_optimizer=work.make_optimizer,
        loss_step=loss_step,
        fetch=fetch,
        device=seat.device,
        timer=StepTimer(seat.device, speed),
        precision=work.settings.precision,
        largest=micro,
        memory_limit=memory_limit(seat),
        seconds=seconds,
    )


def example(work: Work, samples: int) -> Any:
    """Inputs of the model, of so many samples, on the CPU."""
    return work.arithmetic.prepare(samples_of(work, samples)[0])


def samples_of(work: Work, count: int) -> tuple[Any, Any]:
    """Inputs and targets of so many of the run's samples, on the CPU."""
    indices = torch.arange(count).remainder(len(work.train_data)).numpy()  # type: ignore[arg-type]
    return split_batch(collect(work.train_data, indices, work.settings.seed, 0))


def memory_limit(seat: RankEnvironment) -> int | None:
    """What the user granted; else an equal part of this machine's memory, where several ranks share it."""
    if seat.node.memory_bytes is not None or seat.device.type != "cpu":
        return seat.node.memory_bytes
    return usable_memory(str(seat.device))[1] // sum(n.device == "cpu" and n.host == seat.node.host for n in seat.nodes)
