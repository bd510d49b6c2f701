"""`--strategy auto`: is there a better way than data parallelism for this model on these nodes? The oracle says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from evener.comm.group import Group
from evener.errors import DoesNotFit, InvalidInput, TrainingFailed
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.search import search
from evener.plan import Strategy
from evener.profile import ClusterProfile, DeviceProfile, Fabric, TaskTiming
from evener.run.order import Order
from evener.run.prepare import Work, example, memory_limit
from evener.run.strategy import STRATEGIES, check_strategy
from evener.tracer.model_graph import trace_model_graph

MUCH = 1.25
"""A model is divided if that is predicted to be so many times as fast: data parallelism is the better known."""


def better_strategy(
    work: Work,
    world: Group,
    seat: RankEnvironment,
    order: Order,
    timings: Sequence[TaskTiming],
    link: tuple[float, float],
) -> str:
    """The strategy to take instead of data parallelism, or `data` if there is none; the same on every rank.

    Args:
        work: what is to be trained.
        world: all ranks.
        seat: of this rank.
        order: what was asked for.
        timings: of the task on every node.
        link: (alpha [s], beta [s/byte]) of the ring of all ranks.
    """
    allowed = alternatives(order)
    if not allowed:
        return "data"
    memories = [float(row) for row in world.all_gather_bytes(str(memory_limit(seat) or 1 << 62).encode())]
    try:
        graph = trace_model_graph(work.model, example(work, 2), timings[0].task)
        job = TrainingJob(
            graph=graph,
            batch_size=-(-work.settings.batch_size // work.settings.accumulate),
            optimizer=_optimizer(work),
            precision=work.settings.precision,
            task=timings[0].task,
        )
        ranking = search(CostModel(job, _profile(seat, timings, memories, link)), ("serial", "data", *allowed))
    except (TrainingFailed, DoesNotFit):
        return "data"
    divided = next((estimate for estimate in ranking.ranked if estimate.strategy in allowed), None)
    whole = next((q for q in ranking.ranked if q.strategy not in allowed and q.accumulate == 1), None)  # fits as it is
    if divided is None or (whole is not None and whole.step_seconds <= MUCH * divided.step_seconds):
        return "data"
    return divided.strategy


def alternatives(order: Order) -> list[Strategy]:
    """What may be chosen instead of data parallelism: strategies with which the rest of the order goes together."""
    if order.strategy != "auto" or order.shares != "measured":
        return []
    found: list[Strategy] = []
    for strategy in STRATEGIES:
        if strategy in ("auto", "data"):
            continue
        try:
            check_strategy(msgspec.structs.replace(order, strategy=strategy))
        except InvalidInput:
            continue
        found.append(strategy)  # type: ignore[arg-type]  # all of them but `auto` are
    return found


def _optimizer(work: Work) -> str:
    """What it keeps for every parameter, by the name that the oracle knows."""
    made = work.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    if isinstance(made, torch.optim.SGD):
        return "momentum" if made.defaults["momentum"] else "sgd"
    return "adam"


def _profile(
    seat: RankEnvironment, timings: Sequence[TaskTiming], memories: Sequence[float], link: tuple[float, float]
) -> ClusterProfile:
    """The nodes as this run has measured them."""
    return ClusterProfile(
        devices=tuple(
            DeviceProfile(
                node=node.name,
                device=node.device,
                model="",
                cores=1,
                memory_bytes=int(memory),
                usable_memory_bytes=int(memory),
                timings=(timing,),
            )
            for node, timing, memory in zip(seat.nodes, timings, memories, strict=True)
        ),
        fabrics=(Fabric(name="measured", within="cluster", alpha=link[0], beta=link[1]),),
    )
