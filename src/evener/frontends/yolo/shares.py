"""Who takes how many images of a batch: each rank times the model on images of its own, and what its memory holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from evener.benchmark.dry_run import dry_run_of
from evener.benchmark.exchanges import measure_all_reduce
from evener.benchmark.processor_time import ProcessorWatch
from evener.benchmark.task_timing import time_task
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.data.loader import collect
from evener.frontends.yolo.step_gradients import cadence
from evener.launch.nodes import LocalNode, relative_shares
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker, apportion
from evener.oracle.data_parallel import GradientSync
from evener.records.errors import DoesNotFit
from evener.records.plan import Plan, Rejected
from evener.records.profile import TaskTiming
from evener.training.costs import (
    CALIBRATION_SECONDS,
    MEASURE_SECONDS,
    calibrate,
    gradient_bytes,
    gradient_sync,
    memory_limit,
    tell_busy,
    worker_of,
)
from evener.training.elastic.start import time_to_come
from evener.training.planning import Shape, divide

TimeSteps = Callable[[float, float, int], TaskTiming]
"""Times steps at a speed, for so many seconds, up to the number of images that is expected."""


def share_plan(
    env: RankEnvironment,
    group: Group,
    trainer: Any,
    model: nn.Module,
    batch_size: int,
    shares: str,
    *,
    needs_all: bool,
) -> Plan:
    """The plan of a training, the same on every rank; a rank that would make batches longer is left out.

    Args:
        env: of this rank.
        group: all ranks.
        trainer: with data and device.
        model: that it trains.
        batch_size: images of a batch, over all ranks.
        shares: `measured`, `equal`, or relative ones; all but the first let every rank take part.
        needs_all: whether every rank has to.

    Raises:
        DoesNotFit: the nodes together cannot hold a batch.
        InvalidValue: `shares` are not for so many ranks.
    """
    given = relative_shares(shares, group.size)
    rows = tuple((rank,) for rank in range(group.size))
    is_free = all(node.memory_bytes is None and node.device == "cpu" for node in env.nodes)
    if is_free and (group.is_alone or given is not None):  # nothing to find out
        shape = Shape("data", rows, 1, batch_size, given or [1.0])
        return divide(shape, env.nodes, (), batch_size, GradientSync(gradient_bytes=gradient_bytes(model)))
    time_steps = partial(_time, env, trainer, model, batch_size)
    rhythm = cadence(trainer, is_elastic=group.is_elastic)
    expected = -(-batch_size // group.size)
    workers, misfits = _measure(env, group, time_steps, expected, rhythm.batches_of_update)
    if misfits and (needs_all or not workers):
        rank, why = next(iter(misfits.items()))
        raise DoesNotFit(f"node {env.nodes[rank].name}: {why}")
    nodes = [node for rank, node in enumerate(env.nodes) if rank not in misfits]
    given = None if given is None else [share for rank, share in enumerate(given) if rank not in misfits]
    given = given if given is None or any(given) else [1.0] * len(nodes)
    rows = tuple((rank,) for rank in range(len(nodes)))
    sizes = given or [float(size) for size in apportion(batch_size, workers)]
    calibrate(env, group, partial(_time_alone, time_steps, env, nodes, batch_size, sizes))
    exchange = gradient_sync(group, model, measure_all_reduce(group, gradient_bytes(model)))
    exchange = replace(
        exchange, gradient_bytes=round(exchange.gradient_bytes / rhythm.batches_of_exchange)
    )  # of a batch
    shape = Shape("data", rows, 1, batch_size, sizes if given is not None or needs_all else None)
    plan = divide(shape, nodes, workers, batch_size, exchange)
    out = (Rejected(what=env.nodes[rank].name, reason=why, is_node=True) for rank, why in misfits.items())
    return msgspec.structs.replace(
        plan,
        rejected=(*out, *plan.rejected),
        local_steps=trainer.accumulate,
        ring=(exchange.alpha, exchange.beta),
    )


def _time_alone(
    time_steps: TimeSteps, env: RankEnvironment, nodes: Sequence[LocalNode], batch_size: int, sizes: Sequence[float]
) -> TaskTiming | None:
    """What this rank's part of a batch takes at full speed; None if it has no part."""
    if env.node not in nodes:
        return None
    own = math.ceil(batch_size * sizes[nodes.index(env.node)] / sum(sizes))
    return time_steps(1.0, CALIBRATION_SECONDS, own)


def _measure(
    env: RankEnvironment, group: Group, time_steps: TimeSteps, expected: int, every: float
) -> tuple[tuple[Worker, ...], dict[int, str]]:
    """What a batch costs every rank that holds the model and one image, all measuring at the same time.

    The optimiser's update, which follows `every` so many batches, counts to each of them in part.

    Returns:
        One worker for each of these ranks; and by rank, why the others do not hold it.
    """
    group.barrier()
    watch = ProcessorWatch(env.node.name, env.node.cores)
    try:
        own = b"+" + msgspec.json.encode(time_steps(group.timer.pace.speed, MEASURE_SECONDS, expected))
    except DoesNotFit as error:
        own = b"-" + str(error).encode()
    tell_busy(env, group, watch)
    rows = group.all_gather_bytes(own)
    misfits = {rank: row[1:].decode() for rank, row in enumerate(rows) if row.startswith(b"-")}
    timings = [msgspec.json.decode(row[1:], type=TaskTiming) for row in rows if row.startswith(b"+")]
    return tuple(worker_of(one, every) for one in timings), misfits


def cost_here(env: RankEnvironment, trainer: Any, model: nn.Module, largest: int, expected: int) -> Worker:
    """What images cost this rank's node, up to `largest` of a batch; it may expect so many.

    Raises:
        NotNeeded: it cannot hold the model and one image.
    """
    speed = env.node.speed_at(0)
    timing = time_to_come(lambda: _time(env, trainer, model, largest, speed, MEASURE_SECONDS, expected))
    return worker_of(timing, cadence(trainer, is_elastic=True).batches_of_update)


def _time(
    env: RankEnvironment, trainer: Any, model: nn.Module, largest: int, speed: float, seconds: float, expected: int
) -> TaskTiming:
    """Seconds of forward and backward by number of images, at a `speed`. Raises DoesNotFit."""
    dataset, collate = trainer.train_loader.dataset, trainer.train_loader.collate

    def loss_step(twin: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(env.device.type, enabled=bool(trainer.amp), dtype=_half(trainer)):
            loss: Tensor = twin(batch)[0].sum()
        return loss

    def fetch(count: int) -> Any:
        indices = np.arange(count, dtype=np.int64) % len(dataset)
        return trainer.preprocess_batch(collect(dataset, indices, trainer.args.seed, 0, collate))

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        kept = [parameter for parameter in parameters if parameter.requires_grad]
        adaptive = "betas" in trainer.optimizer.defaults
        return AdamW(kept, lr=1e-3) if adaptive else SGD(kept, lr=1e-3, momentum=0.9)

    with dry_run_of(model, make_optimizer, loss_step, fetch, env.device) as trial:
        return time_task(
            trial,
            StepTimer(env.device, speed),
            task=trainer.args.task,
            precision="fp16" if trainer.amp else "fp32",
            largest=largest,
            expected=expected,
            memory_limit=memory_limit(env),
            seconds=seconds,
        )


def _half(trainer: Any) -> torch.dtype:
    return torch.bfloat16 if trainer.args.amp == "bf16" else torch.float16
