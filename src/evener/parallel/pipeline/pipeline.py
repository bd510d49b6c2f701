"""Pipeline parallelism (Huang et al., 2019): layers on several devices, and batches in micro-batches.

    pipeline = Pipeline(model, example, loss, stages=4, micro_batches=16)     # four devices of this process
    pipeline = Pipeline(model, example, loss, on=group, micro_batches=16)     # a stage on every rank of a group
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)                                 # forward and backward of one batch
        optimizer.step()
    outputs = pipeline.eval()(inputs)

A step gives the gradients of a single process that computes the same micro-batches, for any number of stages, any cuts,
any schedule and any recomputation. Without BatchNorm (or with micro_batches=1) these are the gradients of the whole
batch. BatchNorm normalises every micro-batch by its own statistics; its running statistics move by those of the whole
batch.
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
from evener.oracle.schedule import Rematerialise, ScheduleChoice, candidates
from evener.oracle.stages import DeviceGroup
from evener.parallel.full_state import own_part
from evener.parallel.gradient_sums import clip_gradients
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
from evener.parallel.pipeline.sharded_stage import StageTeams, form_team, shard_stage
from evener.parallel.pipeline.shared_tensors import SharedTensors
from evener.parallel.pipeline.stage_modules import make_stage_modules
from evener.parallel.pipeline.timeline import StageEvent, Timeline
from evener.parallel.refusals import require_same
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidValue, require
from evener.tracer.meta_model import on_meta
from evener.tracer.nested import map_tensors, tensors_in


class Pipeline:
    """A model that is cut into stages.

    Args:
        model: The model. Its parts are taken over, not copied. It is on the meta device if it fits no single memory
            (`stage_modules.py`).
        example: Inputs like those of a step: a tensor, or positional or named arguments, all with N samples in dim 0;
            only shapes and dtypes matter.
        loss: Maps (model outputs, targets) to the mean loss over their samples.
        stages: Number of stages K, or names of the modules at which the second and later stages begin; by default one
            stage on every device or rank.
        micro_batches: M; by default 4 K, which leaves the devices idle for at most a fifth of the time.
        on: A group whose ranks each compute a stage, or devices of this process; by default all GPUs of this process,
            or its CPU for all stages.
        schedule: `1f1b`; `gpipe`, which takes as long but needs more memory; `zero-bubble`, which is faster and needs
            up to twice the memory of `1f1b`; or `auto`: `zero-bubble` where it fits and is predicted to be faster.
        rematerialise: `always`, `except_last`, `never`, or `auto`, which recomputes as little as the memory allows.
        costs: Costs that balance the stages: `measured` on every device, `estimated`, or a function.
        team: Memory and links of the devices, if the choice of stages is to respect them.
        replicas: Ranks of every replica; replicas may differ in size. By default there is one replica of all ranks.
        weigh: Counts what `loss` is a mean over in a micro-batch's targets, if that is not samples but, say, tokens.
        targets: Real targets of `example`. If given, the loss is measured too, and the last stage is made smaller.
        teams: Ranks that divide the layers of every stage, if several have one; all get the same batches.

    Attributes:
        schedule: Order of the passes.
        shards: Weights of which this rank has a part among the ranks of its stage, by name.
        share: This rank's share of the work of its divided layers; 1 if no layer is divided.
        moved_buffers: Returns names of buffers that every micro-batch changes, other than statistics of norms.

    Raises:
        InvalidInput: The model cannot be cut; the error names the line.
        InvalidValue: The model cannot be cut into this number of stages, or at these modules.
        DoesNotFit: No cut fits the memory of the devices.
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
        schedule: ScheduleChoice = "auto",
        rematerialise: Rematerialise = "auto",
        costs: Costs = "measured",
        team: DeviceGroup | None = None,
        replicas: Sequence[Sequence[int]] | None = None,
        weigh: LossWeight | None = None,
        targets: Any = None,
        teams: StageTeams | None = None,
    ) -> None:
        is_possible = teams is None or schedule != "zero-bubble"  # its backward passes would exchange twice
        require(is_possible, "schedule", schedule, "gpipe or 1f1b, because several ranks divide the layers of a stage")
        self.teams, self.shards, self.share = teams, dict[str, Shard](), 1.0
        placement = place_stages(on, stages, replicas if teams is None else teams.lanes)
        self._placement = replace(placement, are_lanes=teams is not None)
        micro_batches = 4 * max(map(len, self._placement.replicas)) if micro_batches is None else micro_batches
        sizes = micro_batch_sizes(samples_in(example), max(1, micro_batches))
        first, *others = candidates(schedule, are_divided=teams is not None)
        config = PipelineConfig(
            begins=None if stages is None or isinstance(stages, int) else tuple(stages),
            micro_batches=micro_batches,
            schedule=first,
            others=tuple(others),
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
        """Decide where stages begin, and take over this process's stages."""
        problem = partition_problem(on_meta(model), self._example, self._placement.devices[0])
        plans, self.schedule = plan_partition(problem, config, self._placement)
        config = replace(config, schedule=self.schedule)
        agreed = repr((plans, config.micro_batches, config.schedule, config.rematerialise))
        require_same(self._placement.gather, "the cut of the model", agreed)
        replica = self._placement.own_replica
        self.plan = plans[replica]
        layouts, teams = [plan.layout for plan in plans], self.teams
        ranks = self.plan.layout.ranks if teams is None else [rank for layout in layouts for rank in layout.ranks]
        self._host = StageHost(self._placement, self.plan.layout.ranks, ranks)
        self.moved_buffers = problem.moved_buffers
        self._modules = make_stage_modules(model, self.plan.layout.targets, self._host.devices)
        if teams is not None:
            self._divide(problem, teams)
        families = [layouts] if teams is None else [[layout] for layout in layouts]
        self._shared = SharedTensors(self._placement.group, families, self._modules)
        drawn_as = replica if teams is None else 0
        self._executor = Executor(problem, self.plan, config, self._modules, self._host, drawn_as)

    def _divide(self, problem: PartitionProblem, teams: StageTeams) -> None:
        """Keep only this process's part of its stage's layers."""
        group, ((stage, whole),) = self._placement.group, self._modules.items()
        assert group is not None
        mesh = form_team(group, teams, self.plan.speeds[stage])
        (replica,) = mesh.arrangement.replicas
        self._modules[stage], self.shards = shard_stage(problem, self.plan.layout, stage, whole, mesh)
        if self.shards:
            self.share = replica.shares[mesh.group.rank] / sum(replica.shares)

    @property
    def is_first(self) -> bool:
        """Whether this process runs the first stage, which gets the inputs."""
        return 0 in self._host.devices

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last stage, which gets the targets."""
        return self.num_stages - 1 in self._host.devices

    @property
    def is_reporter(self) -> bool:
        """Whether this process runs the last stage and its loss counts."""
        return self.is_last and (self.teams is None or self._placement.own_replica == 0)

    @property
    def num_stages(self) -> int:
        """Number of stages K."""
        return self.plan.layout.num_stages

    def step(self, inputs: Any = None, targets: Any = None, total: float | None = None) -> Tensor:
        """Run forward and backward on one batch; gradients are added to those of the parameters.

        Every process of the pipeline calls this together.

        Args:
            inputs: Inputs of the batch, on the first stage.
            targets: Targets of the batch, on the last stage.
            total: Samples (or what `weigh` counts) of all replicas' batches together; by default those of this batch.

        Returns:
            This process's part of the loss: the mean over the batch on the last stage, and zero elsewhere.
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
        """Exclude a step's stand-in samples from the statistics of BatchNorms."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def __call__(self, inputs: Any = None) -> Any:
        """Return the model's outputs for `inputs`, without gradients, on the last stage; None elsewhere."""
        header, sizes, programs = self._begin(inputs)
        made = self._executor.evaluate(programs, inputs, sizes, header.seed)
        return joined(made) if self.is_last else None

    def train(self, mode: bool = True) -> Pipeline:
        """Set training or evaluation mode."""
        self.training = mode
        for part in self._modules.values():
            part.root.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set evaluation mode."""
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this process's parameters, by first name in the model; tied ones come once per stage."""
        for part in self._modules.values():
            yield from part.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over parameters of this process's stages."""
        yield from (parameter for _, parameter in self.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over tensors of this process's stages, other than parameters, that a step changes."""
        for part in self._modules.values():
            yield from part.root.buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this process's tensors, under their names in the model."""
        return {name: tensor for part in self._modules.values() for name, tensor in part.root.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this process's tensors from `state`, of the whole model or of a pipeline of any cut.

        Raises:
            InvalidValue: A tensor is missing.
        """
        for part in self._modules.values():
            local = part.root.state_dict()
            missing = sorted(local.keys() - state.keys())
            if missing:
                raise InvalidValue("state", f"none of {missing[0]}", "of the whole model")
            part.root.load_state_dict({name: self._own(name, state[name]) for name in local})

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor; that of its lane if the tensor is divided."""
        return own_part(self.shards[name], whole, self._placement.own_replica) if name in self.shards else whole

    def clip_gradients(self, largest: float) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `largest`; return the norm before.

        Every process of the pipeline calls this. The norm has no dims, and is on the device of this process's first
        stage if that computes in double precision.
        """
        counted, grads = [], []
        for stage, part in self._modules.items():
            earlier = {name for names in self.plan.layout.parameters[:stage] for name in names}  # tied ones count once
            gradients = {name: p.grad for name, p in part.parameters.items() if p.grad is not None}
            is_first = self.teams is None or self._placement.own_replica == 0  # undivided ones count once, too
            counted += [g for name, g in gradients.items() if name in self.shards or (is_first and name not in earlier)]
            grads += list(gradients.values())
        return clip_gradients(counted, grads, largest, self._placement.devices[0], self._placement.gather_norms)

    def timeline(self) -> Timeline:
        """Return the timeline of the last step, over all stages. Every process of the pipeline calls this."""
        rows = self._placement.gather_replica(msgspec.msgpack.encode(self._executor.events()))
        events = [event for row in rows for event in decode_msgpack(row, list[StageEvent])]
        return Timeline(num_stages=self.num_stages, events=tuple(sorted(events, key=lambda event: event.begin)))

    def _begin(self, inputs: Any) -> tuple[BatchHeader, list[int], list[Row]]:
        """Return what all stages need to know of a batch, and the sizes and programs of its micro-batches."""
        if self.is_first and inputs is None:
            raise InvalidValue("inputs", None, "given on the first stage")
        message = msgspec.msgpack.encode(BatchHeader.of(inputs, self._example)) if self.is_first else b""
        header = decode_msgpack(self._host.broadcast(message), BatchHeader)
        programs = self._executor.programs(header.inputs(self._example), self.training)
        return header, micro_batch_sizes(header.samples, self.micro_batches), programs


def _measured_loss(loss: Loss, targets: Any, outputs: Any) -> Tensor:
    """Return the loss of one micro-batch, computed on the device of its outputs."""
    device = next(tensors_in(outputs)).device
    return loss(outputs, map_tensors(targets, lambda tensor: tensor.to(device)))
