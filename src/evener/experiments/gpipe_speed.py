"""GPipe's tables 2 and 3: how many samples a second a pipeline trains, by stages K and micro-batches M."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from evener.atomic import atomic_write
from evener.comm.group import Group, leave_group
from evener.experiments.gpipe_models import Scale
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.parallel.pipeline.pipeline import Pipeline
from evener.run.world import join_world
from evener.schema import Part

_PATIENCE = 600.0


class Speed(Part, frozen=True, kw_only=True):
    """How fast a pipeline trains.

    Attributes:
        family: of models.
        stages: K.
        micro_batches: M.
        samples_per_second: of the median step.
        bubble: idle share of the stages' time in the last step.
    """

    family: str
    stages: int
    micro_batches: int
    samples_per_second: float
    bubble: float


class _Order(Part, frozen=True, kw_only=True):
    scale: Scale
    micro_batches: tuple[int, ...]
    steps: int
    backend: str
    file: str


def speeds(
    scale: Scale, nodes: Sequence[LocalNode], micro_batches: Sequence[int], steps: int, through_host: bool
) -> list[Speed]:
    """Of the model that is timed, a stage on each of `nodes`, for every number of micro-batches in turn.

    Args:
        scale: of the model.
        nodes: one a stage.
        micro_batches: numbers M.
        steps: to be timed.
        through_host: whether tensors travel through the memory of the host, even between GPUs.
    """
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        file = Path(folder, "speeds.json")
        on_gpus = all(node.device.startswith("cuda") for node in nodes)
        order = _Order(
            scale=scale,
            micro_batches=tuple(micro_batches),
            steps=steps,
            backend="nccl" if on_gpus and not through_host else "gloo",
            file=str(file),
        )
        run_local(_time, nodes, order, patience=_PATIENCE, on_event=lambda _: None)
        return msgspec.json.decode(file.read_bytes(), type=list[Speed])


def _time(seat: RankEnvironment, order: _Order) -> None:
    """What every rank does."""
    group = join_world(seat, order.backend)
    found = [_timed(group, order, micro_batches) for micro_batches in order.micro_batches]
    if group.is_leader:
        atomic_write(Path(order.file), msgspec.json.encode(found))
    group.barrier()
    leave_group()


def _timed(group: Group, order: _Order, micro_batches: int) -> Speed:
    """Steps of all stages; the first one, which warms up, is not counted."""
    scale = order.scale
    torch.manual_seed(0)
    inputs, targets = scale.batch(scale.timed_samples)
    pipeline = Pipeline(
        scale.build_timed(),
        inputs,
        scale.loss,
        micro_batches=micro_batches,
        on=group if group.size > 1 else [group.device],
        schedule="gpipe",
        rematerialise="always",
        costs="estimated",
        weigh=scale.weigh,
    )
    took = []
    for _ in range(order.steps + 1):
        group.barrier()
        begin = time.perf_counter()
        pipeline.step(inputs, targets)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()
        took.append(time.perf_counter() - begin)
    return Speed(
        family=scale.family,
        stages=group.size,
        micro_batches=micro_batches,
        samples_per_second=scale.timed_samples / median(took[1:]),
        bubble=pipeline.timeline().bubble,
    )
