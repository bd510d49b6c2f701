"""One cell of the experiment with strategies: some ranks, a process each, time training steps of ResNet-152."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.atomic import atomic_write
from evener.comm.group import Group, leave_group
from evener.errors import DoesNotFit, EvenerError
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.models.resnet import resnet152
from evener.oracle.data_parallel import samples_of_replicas
from evener.oracle.division.planner import Arrangement, Replica
from evener.parallel.divided import DividedModel
from evener.parallel.normalisation import synchronise_batch_norm
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.replicated import ReplicatedModel
from evener.run.strategy import division_of, is_pipeline, replica_rows
from evener.run.world import join_world
from evener.schema import Part

CLASSES = 200
"""Of Tiny ImageNet."""
_PATIENCE = 600.0


class Network(Part, frozen=True, kw_only=True):
    """Which ResNet, on what.

    Attributes:
        size: rows and columns of an image.
        width: channels of the stem.
        depths: blocks of the four layers.
    """

    size: int = 64
    width: int = 64
    depths: tuple[int, int, int, int] = (3, 8, 36, 3)

    def build(self) -> nn.Sequential:
        """With the same weights on every rank."""
        torch.manual_seed(0)
        return resnet152(CLASSES, self.width, self.depths)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Images that are noise, and labels; the same on every rank."""
        draw = torch.Generator().manual_seed(1)
        images = torch.randn(samples, 3, self.size, self.size, generator=draw)
        return images, torch.randint(0, CLASSES, (samples,), generator=draw)


class Cell(Part, frozen=True, kw_only=True):
    """What is to be timed.

    Attributes:
        strategy: as `evener train --strategy` knows it; `serial` for one process.
        ranks: number of them.
        batch: samples of a step.
        chunks: micro-batches of a pipeline; 1 elsewhere.
    """

    strategy: str
    ranks: int
    batch: int
    chunks: int = 1

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The ranks of every replica."""
        if self.strategy in ("serial", "data"):
            return [[rank] for rank in range(self.ranks)]
        return replica_rows(self.strategy, None, self.ranks)


class Timing(Part, frozen=True, kw_only=True):
    """What a cell took.

    Attributes:
        seconds: of a step, median.
        fastest: of all steps.
        slowest: of all steps.
        sent_bytes: in a step, by the rank that sends most.
    """

    seconds: float
    fastest: float
    slowest: float
    sent_bytes: int


class _Order(Part, frozen=True, kw_only=True):
    cell: Cell
    network: Network
    steps: int
    file: str


def time_cell(cell: Cell, network: Network, nodes: Sequence[LocalNode], steps: int) -> Timing | None:
    """Time `steps` steps on `nodes`; None if they do not fit their memory.

    Raises:
        EvenerError: a rank failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        file = Path(folder, "timing.json")
        order = _Order(cell=cell, network=network, steps=steps, file=str(file))
        try:
            run_local(_time, nodes, order, patience=_PATIENCE, on_event=lambda _: None)
        except EvenerError as error:
            if error.exit_code != DoesNotFit.exit_code:
                raise
            return None
        return msgspec.json.decode(file.read_bytes(), type=Timing)


def _time(seat: RankEnvironment, order: _Order) -> None:
    """What every rank does."""
    group = join_world(seat)
    timing = _timed(group, order)
    if group.is_leader:
        atomic_write(Path(order.file), msgspec.json.encode(timing))
    group.barrier()
    leave_group()


def _timed(group: Group, order: _Order) -> Timing:
    """Steps of all ranks together; the first one, which warms up, is not counted."""
    cell, (images, labels) = order.cell, order.network.batch(order.cell.batch)
    samples = samples_of_replicas(cell.rows, [1.0] * cell.ranks, cell.batch)
    replica = next(i for i, row in enumerate(cell.rows) if group.rank in row)
    start, count = sum(samples[:replica]), samples[replica]
    own, targets = (whole[start : start + count].to(group.device) for whole in (images, labels))
    model = _joined(order, group, replica, own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    took: list[float] = []
    before = 0.0
    for _ in range(order.steps + 1):
        before = group.traffic.sent_bytes
        _wait_for_all(group)
        begin = time.perf_counter()
        optimizer.zero_grad()
        group.pace.resume("fb")
        model.add_gradients(own, targets, samples=count, total=cell.batch, is_last=True)
        group.pace.pause()
        group.pace.resume("wu")
        optimizer.step()
        group.pace.close_step(count)
        _wait_for_all(group)
        took.append(time.perf_counter() - begin)
    (sent,) = group.all_reduce_max([group.traffic.sent_bytes - before])
    counted = took[1:]
    return Timing(seconds=median(counted), fastest=min(counted), slowest=max(counted), sent_bytes=round(sent))


def _wait_for_all(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def _joined(order: _Order, group: Group, replica: int, inputs: Tensor) -> ParallelModel:
    """This rank's part of the network."""
    cell, model = order.cell, order.network.build()
    criterion = Criterion(loss=F.cross_entropy, autocast=nullcontext, scale=lambda loss: loss)
    if is_pipeline(cell.strategy):
        example = order.network.batch(cell.batch)[0]
        return StagedModel(
            model, group, replica, criterion, example=example, micro_batches=cell.chunks, replicas=cell.rows
        )
    model.to(group.device)
    if cell.strategy in ("serial", "data"):
        return ReplicatedModel(synchronise_batch_norm(model, group) if group.size > 1 else model, group, criterion)
    replicas = tuple(Replica(shares=(1.0,) * len(row)) for row in cell.rows)
    arrangement = Arrangement(division=division_of(cell.strategy), replicas=replicas)
    return DividedModel(model, form_process_mesh(group, arrangement), inputs, criterion)
