"""Pipeline parallelism (Huang et al., 2019): the layers of a model on several devices, a batch through them in parts.

    pipeline = Pipeline(model, example, loss, stages=4, micro_batches=16)     # four devices of this process
    pipeline = Pipeline(model, example, loss, on=group, micro_batches=16)     # a stage on every rank of a group
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)                                 # forward and backward of one batch
        optimizer.step()
    outputs = pipeline.eval()(inputs)

A step gives the gradients of one process that computes the same micro-batches, whatever the number of stages and where
the cuts are, the schedule, and what is recomputed. Without BatchNorm (or with micro_batches=1) those are the gradients
of the whole batch at once. BatchNorm normalises every micro-batch by its own statistics; its running statistics move by
those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.plan import Shard
from evener.oracle.schedule import Rematerialise, ScheduleName
from evener.oracle.stages import DeviceGroup
from evener.parallel.full_state import own_part
from evener.parallel.gradient_sums import clip_gradients
from evener.parallel.pipeline.divided_stage import StageTeams, divide_stage, form_team
from evener.parallel.pipeline.executor import Executor, Row
from evener.parallel.pipeline.micro_batches import (
    BatchHeader,
    Loss,
    LossWeight,
    divided,
    joined,
    micro_batch_sizes,
    resized,
    samples_in,
    scaled_loss,
)
from evener.parallel.pipeline.partition_plan import Costs, PipelineConfig, plan_partition
from evener.parallel.pipeline.partition_problem import PartitionProblem, partition_problem
from evener.parallel.pipeline.placement import StageHost, place_stages
from evener.parallel.pipeline.shared_tensors import SharedTensors
from evener.parallel.pipeline.stage_modules import make_stage_modules
from evener.parallel.pipeline.timeline import StageEvent, Timeline
from evener.parallel.refusals import require_same
from evener.records.errors import InvalidValue
from evener.tracer.meta_model import on_meta
from evener.tracer.nested import map_tensors, tensors_in


class Pipeline:
    """A model cut into stages.

    Args:
        model: its parts are taken over, not copied; on the meta device if it fits no single memory (`materialise.py`).
        example: inputs like those of a step: a tensor, or positional or named arguments, N samples in dim 0 of all;
            only shapes and dtypes matter.
        loss: mean loss of (what the model returns, targets) over the samples that it is given.
        stages: their number K, or the names of the modules at which the second and later ones begin; by default one
            on every device or rank.
        micro_batches: M; by default 4 K, which leaves the devices idle for a fifth of the time at most.
        on: a group, of which every rank computes a stage; or devices of this process; by default all of its GPUs, or
            its processor for all stages.
        schedule: `1f1b`, or `gpipe`, which takes as long but holds more.
        rematerialise: `always`, `except_last`, `never`, or `auto`: as little as the memory allows.
        costs: by which stages are balanced: `measured` on every device, `estimated`, or a function.
        team: memory and links of the devices, if the choice of stages is to respect them.
        replicas: ranks of every replica, which may differ in number; by default one replica of all.
        weigh: of a micro-batch's targets, the number that `loss` is a mean over, if not samples: tokens, say.
        targets: of `example`, real ones: then the loss is measured, too, and the last stage made that much smaller.
        teams: ranks that divide the layers of every stage, if several have one; all are given the same batches.

    Attributes:
        shards: by name, weights of which this rank has a part, among the ranks of its stage.
        share: of the work of its layers that are divided; 1 if none is.
        moved_buffers: finds the names of buffers that every micro-batch changes, other than statistics of norms.

    Raises:
        InvalidInput: the model cannot be cut; names the line.
        InvalidValue: not into so many stages, or not there.
        DoesNotFit: no cut fits the memory of the devices.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        loss: Loss,
        *,
        stages: int | Sequence[str] | None = None,
        micro_batches: int | None = None,
        on: Group | Sequence[torch.device] | None = None,
        schedule: ScheduleName = "1f1b",
        rematerialise: Rematerialise = "auto",
        costs: Costs = "measured",
        team: DeviceGroup | None = None,
        replicas: Sequence[Sequence[int]] | None = None,
        weigh: LossWeight | None = None,
        targets: Any = None,
        teams: StageTeams | None = None,
    ) -> None:
        self.teams, self.shards, self.share = teams, dict[str, Shard](), 1.0
        placement = place_stages(on, stages, replicas if teams is None else teams.lanes)
        self._placement = replace(placement, are_lanes=teams is not None)
        micro_batches = 4 * max(map(len, self._placement.replicas)) if micro_batches is None else micro_batches
        sizes = micro_batch_sizes(samples_in(example), max(1, micro_batches))
        config = PipelineConfig(
            begins=None if stages is None or isinstance(stages, int) else tuple(stages),
            micro_batches=micro_batches,
            schedule=schedule,
            rematerialise=rematerialise,
            costs=costs,
            team=team,
            loss=None if targets is None else partial(_measured_loss, loss, divided(targets, sizes)[0]),
        )
        self.micro_batches, self.training, self._counts = micro_batches, True, True
        self._loss, self._weigh = loss, weigh if weigh is not None else samples_in
        self._example = resized(example, sizes[0])
        self._cut(model, config)

    def _cut(self, model: nn.Module, config: PipelineConfig) -> None:
        """Decide where stages begin, and take this process's ones."""
        problem = partition_problem(on_meta(model), self._example, self._placement.devices[0])
        plans = plan_partition(problem, config, self._placement)
        agreed = repr((plans, config.micro_batches, config.schedule, config.rematerialise))
        require_same(self._placement.gather, "the cut of the model", agreed)
        replica = self._placement.own_replica
        self.plan = plans[replica]
        layouts, teams = [plan.layout for plan in plans], self.teams
        told = self.plan.layout.ranks if teams is None else [rank for layout in layouts for rank in layout.ranks]
        self._host = StageHost(self._placement, self.plan.layout.ranks, told)
        self.moved_buffers = problem.moved_buffers
        self._modules = make_stage_modules(model, self.plan.layout.targets, self._host.devices)
        if teams is not None:
            self._divide(problem, teams)
        families = [layouts] if teams is None else [[layout] for layout in layouts]
        self._shared = SharedTensors(self._placement.group, families, self._modules)
        drawn_as = replica if teams is None else 0
        self._executor = Executor(problem, self.plan, config, self._modules, self._host, drawn_as)

    def _divide(self, problem: PartitionProblem, teams: StageTeams) -> None:
        """Keep of the layers of this process's stage what it has of them."""
        group, ((stage, whole),) = self._placement.group, self._modules.items()
        assert group is not None
        mesh = form_team(group, teams, self.plan.speeds[stage])
        (replica,) = mesh.arrangement.replicas
        self._modules[stage], self.shards = divide_stage(problem, self.plan.layout, stage, whole, mesh)
        if self.shards:
            self.share = replica.shares[mesh.group.rank] / sum(replica.shares)

    @property
    def is_first(self) -> bool:
        """Whether this process runs the first stage, which is given the inputs."""
        return 0 in self._host.devices

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last stage, which is given the targets."""
        return self.num_stages - 1 in self._host.devices

    @property
    def is_reporter(self) -> bool:
        """Whether the loss of this process, which runs the last stage, is the one that counts."""
        return self.is_last and (self.teams is None or self._placement.own_replica == 0)

    @property
    def num_stages(self) -> int:
        """K."""
        return self.plan.layout.num_stages

    def step(self, inputs: Any = None, targets: Any = None, total: float | None = None) -> Tensor:
        """Forward and backward of one batch; gradients are added to those of the parameters.

        Every process of the pipeline calls this at the same time.

        Args:
            inputs: of the batch, where the first stage is.
            targets: of the batch, where the last stage is.
            total: samples (or what `weigh` counts) of all replicas' batches together; by default of this batch.

        Returns:
            This process's part of the loss, which is a sum over processes: the mean over the batch where the last stage
            is, zero elsewhere.
        """
        header, sizes, programs = self._begin(inputs)
        loss: Callable[[Any, int], Tensor] | None = None
        if self.is_last:
            device = self._host.devices[self.num_stages - 1]
            loss = scaled_loss(self._loss, self._weigh, targets, sizes, total, device)
        self._shared.begin()
        loss_here = self._executor.train(programs, inputs, sizes, loss, header.seed)
        self._shared.sum_gradients()
        if not self._counts:
            self._executor.forget()
        if self.training:
            self._shared.move_statistics()
        return loss_here

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, BatchNorms take no notice of a step's samples: they stand in for a batch that has none."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def __call__(self, inputs: Any = None) -> Any:
        """What the model returns for `inputs`, without gradients, where the last stage is; None elsewhere."""
        header, sizes, programs = self._begin(inputs)
        made = self._executor.evaluate(programs, inputs, sizes, header.seed)
        return joined(made) if self.is_last else None

    def train(self, mode: bool = True) -> Pipeline:
        """From now on the model trains, or evaluates."""
        self.training = mode
        for part in self._modules.values():
            part.root.train(mode)
        return self

    def eval(self) -> Pipeline:
        """From now on the model evaluates."""
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this process's stages, by their first names in the model; tied ones come once a stage."""
        for part in self._modules.values():
            yield from part.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this process's stages."""
        yield from (parameter for _, parameter in self.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Tensors of this process's stages that a step changes besides the parameters, such as running statistics."""
        for part in self._modules.values():
            yield from part.root.buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """What this process holds, under the names that it has in the model."""
        return {name: tensor for part in self._modules.values() for name, tensor in part.root.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take from `state`, of the whole model or of a pipeline of any cut, what this process holds.

        Raises:
            InvalidValue: something is not in it.
        """
        for part in self._modules.values():
            own = part.root.state_dict()
            missing = sorted(own.keys() - state.keys())
            if missing:
                raise InvalidValue("state", f"none of {missing[0]}", "of the whole model")
            part.root.load_state_dict({name: self._own(name, state[name]) for name in own})

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """What this process holds of a tensor; of one that is divided, the part of its lane."""
        return own_part(self.shards[name], whole, self._placement.own_replica) if name in self.shards else whole

    def clip_gradients(self, most: float) -> float:
        """Scale all gradients so that their norm, over all stages, is `most` at most; returns what it was.

        Every process of the pipeline calls this.
        """
        counted, grads = [], []
        for stage, part in self._modules.items():
            earlier = {name for names in self.plan.layout.parameters[:stage] for name in names}  # tied ones count once
            own = {name: p.grad for name, p in part.parameters.items() if p.grad is not None}
            is_first = self.teams is None or self._placement.own_replica == 0  # undivided ones count once, too
            counted += [g for name, g in own.items() if name in self.shards or (is_first and name not in earlier)]
            grads += list(own.values())
        gather = self._placement.gather_replica if self.teams is None else self._placement.gather
        return clip_gradients(counted, grads, most, gather)

    def timeline(self) -> Timeline:
        """Of the last step, over all stages; every process of the pipeline calls this."""
        rows = self._placement.gather_replica(msgspec.msgpack.encode(self._executor.events()))
        events = [event for row in rows for event in msgspec.msgpack.decode(row, type=list[StageEvent])]
        return Timeline(num_stages=self.num_stages, events=tuple(sorted(events, key=lambda event: event.begin)))

    def _begin(self, inputs: Any) -> tuple[BatchHeader, list[int], list[Row]]:
        """What all stages have to know of a batch, samples of its micro-batches, and what is done with each of them."""
        if self.is_first and inputs is None:
            raise InvalidValue("inputs", None, "given where the first stage is")
        message = msgspec.msgpack.encode(BatchHeader.of(inputs, self._example)) if self.is_first else b""
        header = msgspec.msgpack.decode(self._host.broadcast(message), type=BatchHeader)
        programs = self._executor.programs(header.inputs(self._example), self.training)
        return header, micro_batch_sizes(header.samples, self.micro_batches), programs


def _measured_loss(loss: Loss, targets: Any, outputs: Any) -> Tensor:
    """The loss of one micro-batch, computed where its outputs are."""
    device = next(tensors_in(outputs)).device
    return loss(outputs, map_tensors(targets, lambda tensor: tensor.to(device)))
