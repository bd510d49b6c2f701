"""The cost of samples on every node, measured by all ranks together before work is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from evener.benchmark.dry_run import dry_run_of
from evener.benchmark.exchanges import Sums, measure_small_exchange, measure_sums
from evener.benchmark.processor_time import (
    MAX_TAKEN_SHARE,
    ProcessorTime,
    ProcessorWatch,
    busy_sentence,
    quota_sentence,
    taken_by_others,
)
from evener.benchmark.task_timing import affine, time_task
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.data.loader import to_device
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.data_parallel import GradientSync
from evener.oracle.schedule import ScheduleChoice
from evener.oracle.search import search
from evener.parallel.optimizer_probe import stand_ins
from evener.parallel.parallel_model import require_scalar
from evener.parallel.shared_statistics import statistics_exchanges
from evener.records.decoding import decode_json
from evener.records.errors import DoesNotFit, TrainingFailed
from evener.records.profile import ClusterProfile, DeviceProfile, Fabric, TaskTiming
from evener.records.record import Event
from evener.system.cores import cpu_quota
from evener.system.memory import usable_memory
from evener.system.pace import StepSeconds
from evener.tracer.model_graph import trace_model_graph
from evener.tracer.nested import call
from evener.training.context import RankContext

MEASURE_SECONDS = 1.5
CALIBRATION_SECONDS = 0.5
"""For timing the reference steps of throttled nodes."""
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Measured costs, the same on every rank.

    Attributes:
        timings: of the whole model, one a node that holds it and one sample.
        workers: costs of a micro-batch on each of them.
        misfits: by rank, why a node cannot hold the model and one sample.
    """

    timings: tuple[TaskTiming, ...] = ()
    workers: tuple[NodeCost, ...] = ()
    misfits: Mapping[int, str] = field(default_factory=dict)


def measure_costs(context: RankContext, micro: int, accumulate: int = 1) -> MeasuredCosts:
    """Time micro-batches of up to `micro` samples, `accumulate` a step, on all nodes at the same time.

    The result is cached: after a refused strategy, the next one is planned with the same costs.
    """
    if (micro, accumulate) not in context.measured:
        context.measured[micro, accumulate] = measure_ranks(
            context.env, context.group, partial(time_here, context, micro), accumulate
        )
    known: MeasuredCosts = context.measured[micro, accumulate]
    return known


def measure_ranks(
    env: RankEnvironment, group: Group, measure: Callable[[], TaskTiming], accumulate: float
) -> MeasuredCosts:
    """Measure the cost of a micro-batch on all ranks at the same time; all ranks call this.

    Args:
        env: of this rank.
        group: all ranks.
        measure: times micro-batches here; raises DoesNotFit if this rank cannot hold the model and one sample.
        accumulate: micro-batches per update of the optimizer, which counts in part to each of them.
    """
    watch = ProcessorWatch(env.node.name, env.node.cores)
    try:
        encoded = b"+" + msgspec.json.encode(measure())
    except DoesNotFit as error:
        encoded = b"-" + str(error).encode()
    tell_busy(env, group, watch)
    rows = group.all_gather_bytes(encoded)
    misfits = {rank: row[1:].decode() for rank, row in enumerate(rows) if row.startswith(b"-")}
    timings = tuple(decode_json(row[1:], TaskTiming) for row in rows if row.startswith(b"+"))
    workers = tuple(worker_of(one, accumulate) for one in timings)
    return MeasuredCosts(timings=timings, workers=workers, misfits=misfits)


def tell_busy(env: RankEnvironment, group: Group, watch: ProcessorWatch) -> None:
    """Have the leader report CPU quotas and nodes whose CPU other processes use; all ranks call this."""
    rows = group.all_gather_bytes(msgspec.json.encode(watch.stop()))
    times = [decode_json(row, ProcessorTime) for row in rows]
    shares = taken_by_others(times)
    if group.is_leader and (sentence := quota_sentence(times)):
        limited = tuple(one.node for one in times if one.quota is not None)
        env.notify(Event(step=0, kind="CPU quota", message=sentence, nodes=limited))
    if group.is_leader and (sentence := busy_sentence(shares)):
        nodes = tuple(node for node, share in shares.items() if share > MAX_TAKEN_SHARE)
        env.notify(Event(step=0, kind="busy machine", message=sentence, nodes=nodes))


def worker_of(timing: TaskTiming, accumulate: float = 1) -> NodeCost:
    """Return the cost of a micro-batch; the update of a step is divided among its micro-batches."""
    fixed, each = affine(timing)
    fixed -= timing.update_seconds * (1 - 1 / accumulate)
    return NodeCost(unit_seconds=max(each, 1e-9), fixed_seconds=max(fixed, 0.0), max_units=timing.max_samples)


def measure_sums_of(env: RankEnvironment, group: Group, model: nn.Module) -> Sums:
    """Choose how the gradients of `model` are summed over all ranks, and measure that; all ranks call this."""
    return measure_sums(group, gradient_bytes(model), [node.host for node in env.nodes])


def gradient_sync(group: Group, model: nn.Module, sums: Sums, accumulate: int = 1) -> GradientSync:
    """Return the exchanges of replicas in a step of `accumulate` micro-batches."""
    statistics, statistics_bytes = statistics_exchanges(model)
    return GradientSync(
        gradient_bytes=gradient_bytes(model),
        statistics=statistics * accumulate,
        statistics_bytes=statistics_bytes * accumulate,
        message_seconds=measure_small_exchange(group),
        alpha=sums.alpha,
        beta=sums.beta,
    )


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of all gradients."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def node_memories(context: RankContext) -> list[int]:
    """Return the bytes that every rank may use."""
    limit = str(memory_limit(context.env) or _UNBOUNDED).encode()
    return [int(row) for row in context.group.all_gather_bytes(limit)]


def memory_limit(env: RankEnvironment) -> int | None:
    """Return the user's limit, or an equal part of the device's memory for every rank on it; None: the whole GPU."""
    if env.node.memory_bytes is not None:
        return env.node.memory_bytes
    sharers = sum(node.device == env.node.device and node.host == env.node.host for node in env.nodes)
    if env.device.type != "cpu" and sharers == 1:
        return None
    return usable_memory(str(env.device))[1] // sharers


def calibrate_pace(context: RankContext, micro: int, accumulate: int) -> None:
    """Call `calibrate` with steps of the run's task, where a node holds the model."""

    def time_alone() -> TaskTiming | None:
        try:
            return _time(context, micro, speed=1.0, seconds=CALIBRATION_SECONDS)
        except DoesNotFit:
            return None

    calibrate(context.env, context.group, time_alone, accumulate)


def calibrate(
    env: RankEnvironment, group: Group, time_alone: Callable[[], TaskTiming | None], accumulate: int = 1
) -> None:
    """Let every throttled local node time a step at full speed, one node after the other.

    A node with a CPU quota does not: the kernel would stop it while it measures.

    Args:
        env: of this rank.
        group: the ranks; all of them call this.
        time_alone: times a step of this rank; None if it cannot.
        accumulate: micro-batches of a step.
    """
    for rank, node in enumerate(env.nodes):
        if min(speed for _, speed in node.speeds) == 1.0:
            continue
        if rank == env.rank and cpu_quota() is None and (timing := time_alone()) is not None:
            fixed, each = affine(timing)
            group.timer.pace.reference = StepSeconds(fixed=accumulate * fixed, each=each)
        group.barrier()


def time_here(context: RankContext, micro: int) -> TaskTiming:
    """Time batches of the run's samples on this rank, while all other ranks do the same.

    Raises:
        DoesNotFit: this node cannot hold the model and one sample.
    """
    context.group.barrier()
    return _time(context, micro, speed=context.group.timer.pace.speed, seconds=MEASURE_SECONDS)


def _time(context: RankContext, micro: int, *, speed: float, seconds: float) -> TaskTiming:
    device = context.env.device

    def loss_step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        with context.arithmetic.autocast():
            return require_scalar(context.task.loss(call(model, inputs), targets))

    def fetch(samples: int) -> Any:
        return to_device(context.samples(samples), device)

    with dry_run_of(context.model, context.make_optimizer, loss_step, fetch, device) as trial:
        return time_task(
            trial,
            StepTimer(device, speed),
            task=context.task.name,
            precision=context.arithmetic.precision,
            largest=micro,
            memory_limit=memory_limit(context.env),
            seconds=seconds,
        )


def price(
    context: RankContext,
    names: Sequence[str],
    costs: MeasuredCosts,
    sums: Sums,
    accumulate: int,
    schedule: ScheduleChoice,
) -> Sequence[CostEstimate]:
    """Return the predicted step times of candidates that fit, fastest first; empty if there is no choice.

    Args:
        context: of this rank.
        names: strategies among which to choose.
        costs: times of the nodes.
        sums: over all nodes.
        accumulate: micro-batches of a step, one after the other.
        schedule: order of the passes of pipelines.
    """
    if len(names) == 1 or costs.misfits:
        return ()
    memories = node_memories(context)
    try:
        graph = trace_model_graph(context.model, context.samples(2)[0], costs.timings[0].task)
        job = TrainingJob(
            graph=graph,
            batch_size=-(-context.batch_size // accumulate),
            optimizer=_optimizer_name(context),
            precision=context.arithmetic.precision,
            task=costs.timings[0].task,
            schedule=schedule,
        )
        profile = _profile(context.env.nodes, costs, memories, sums)
        return search(CostModel(job, profile), ("serial", *names)).ranked  # type: ignore[arg-type]  # are checked
    except (TrainingFailed, DoesNotFit):  # there is no graph of the model, or the oracle knows no way: no prices
        return ()


def _optimizer_name(context: RankContext) -> str:
    """Return the oracle's name for an optimiser with the same state per parameter."""
    made = context.make_optimizer(stand_ins(context.model))
    if isinstance(made, torch.optim.SGD):
        return "momentum" if made.defaults["momentum"] else "sgd"
    return "adam"


def _profile(nodes: Sequence[NodeSpec], costs: MeasuredCosts, memories: Sequence[int], sums: Sums) -> ClusterProfile:
    """Return a profile of the nodes from this run's measurements."""
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(
                node=node.name,
                device=node.device,
                model="",
                cores=1,
                memory_bytes=memory,
                usable_memory_bytes=memory,
                timings=(timing,),
            )
            for node, timing, memory in zip(nodes, costs.timings, memories, strict=True)
        ),
        fabrics=(Fabric(name="measured", within="cluster", alpha=sums.alpha, beta=sums.beta),),
    )
