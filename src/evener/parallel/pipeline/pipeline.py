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
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.errors import InvalidValue, require
from evener.oracle.schedule import SCHEDULES, ScheduleName
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.announcement import Announcement, announce, decode
from evener.parallel.pipeline.batches import divided, joined, resized, samples_in, sizes_of
from evener.parallel.pipeline.design import Wish, design
from evener.parallel.pipeline.mail import Post
from evener.parallel.pipeline.own_stages import OwnStages
from evener.parallel.pipeline.partition_problem import partition_problem
from evener.parallel.pipeline.places import places
from evener.parallel.pipeline.randomness import mix
from evener.parallel.pipeline.rematerialise import POLICIES, Rematerialise
from evener.parallel.pipeline.site import agree_upon, site
from evener.parallel.pipeline.stage_modules import make_stage_modules
from evener.parallel.pipeline.stage_timing import Costs
from evener.parallel.pipeline.timeline import Timeline, decode_events, encode_events
from evener.parallel.pipeline.weighting import Loss, Weigh, measured_loss, weighted
from evener.parallel.pipeline.weights import clip, load_state, state_of
from evener.tracer.meta_model import on_meta

T = TypeVar("T")


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
        weigh: Weigh | None = None,
        targets: Any = None,
    ) -> None:
        where = places(on, stages, replicas)
        micro_batches = 4 * max(map(len, where.replicas)) if micro_batches is None else micro_batches
        require(micro_batches > 0, "micro_batches", micro_batches, "positive")
        require(schedule in SCHEDULES, "schedule", schedule, f"one of {', '.join(SCHEDULES)}")
        require(rematerialise in POLICIES, "rematerialise", rematerialise, f"one of {', '.join(POLICIES)}")
        self.micro_batches, self.training, self._counts = micro_batches, True, True
        self._loss, self._weigh = loss, weigh if weigh is not None else samples_in
        sizes = sizes_of(samples_in(example), micro_batches)
        wish = Wish(
            begins=None if stages is None or isinstance(stages, int) else tuple(stages),
            micro_batches=micro_batches,
            schedule=schedule,
            rematerialise=rematerialise,
            costs=costs,
            team=team,
            loss=None if targets is None else partial(measured_loss, loss, divided(targets, sizes)[0]),
        )
        self._example = resized(example, sizes[0])
        to_cut = partition_problem(on_meta(model), self._example, where.devices[0])
        designs = design(to_cut, wish, where.devices, where.replicas, where.gather, where.speed)
        self._replica, self.design = where.own_replica, designs[where.own_replica]
        self._site = site(where, [one.layout for one in designs])
        agree_upon(self._site, "the cut of the model", repr((designs, micro_batches, schedule, rematerialise)))
        self._parts = make_stage_modules(model, self.design.layout.targets, self._site.devices)
        self._shared = self._site.shared(self._parts)
        self._stages = OwnStages(to_cut, self.design, wish, self._parts, self._site.devices, self._site.timer)

    @property
    def is_first(self) -> bool:
        """Whether this process runs the first stage, which is given the inputs."""
        return 0 in self._site.devices

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last stage, which is given the targets."""
        return self.num_stages - 1 in self._site.devices

    @property
    def num_stages(self) -> int:
        """K."""
        return self.design.layout.num_stages

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
        announced = self._announce(inputs)
        sizes = sizes_of(announced.samples, self.micro_batches)
        loss: Callable[[Any, int], Tensor] | None = None
        if self.is_last:
            device = self._site.devices[self.num_stages - 1]
            loss = weighted(self._loss, self._weigh, targets, sizes, total, device)
        rows = self._stages.programs(announced.inputs(self._example), training=self.training)
        work = self._stages.training(rows, inputs, sizes, loss)
        self._shared.begin()
        losses = self._run(work, announced.seed)
        self._shared.sum_gradients()
        if not self._counts:
            self._stages.forget()
        if self.training:
            self._shared.move_statistics()
        return losses[max(losses)]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, BatchNorms take no notice of a step's samples: they stand in for a batch that has none."""
        self._counts = False
        yield
        self._counts = True

    def __call__(self, inputs: Any = None) -> Any:
        """What the model returns for `inputs`, without gradients, where the last stage is; None elsewhere."""
        announced = self._announce(inputs)
        sizes = sizes_of(announced.samples, self.micro_batches)
        rows = self._stages.programs(announced.inputs(self._example), training=self.training)
        made = self._run(self._stages.evaluating(rows, inputs, sizes), announced.seed)
        return joined(made[self.num_stages - 1]) if self.is_last else None

    def train(self, mode: bool = True) -> Pipeline:
        """From now on the model trains, or evaluates."""
        self.training = mode
        for part in self._parts.values():
            part.root.train(mode)
        return self

    def eval(self) -> Pipeline:
        """From now on the model evaluates."""
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this process's stages, by their first names in the model; tied ones come once a stage."""
        for part in self._parts.values():
            yield from part.parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this process's stages."""
        yield from (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """What this process holds, under the names that it has in the model."""
        return state_of(self._parts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take from `state`, of the whole model or of a pipeline of any cut, what this process holds.

        Raises:
            InvalidValue: something is not in it.
        """
        load_state(self._parts, state)

    def clip_gradients(self, most: float) -> float:
        """Scale all gradients so that their norm, over all stages, is `most` at most; returns what it was.

        Every process of the pipeline calls this.
        """
        return clip(
            self._parts, self.design.layout, most, lambda own: sum(map(float, self._gather(repr(own).encode())))
        )

    def bytes_to_send(self, samples: int) -> dict[str, int]:
        """Bytes of activations and gradients that this process sends to other stages in a step of so many samples."""
        rows = self._stages.programs(resized(self._example, samples), training=self.training)
        own = [program for row in rows for program in row.values()]
        return {
            "activations": sum(value.nbytes * len(value.used_by) for p in own for value in p.outputs),
            "gradients": sum(value.nbytes for p in own for value in p.inputs if value.needs_grad),
        }

    def timeline(self) -> Timeline:
        """Of the last step, over all stages; every process of the pipeline calls this."""
        own = encode_events(self._stages.events())
        events = [event for row in self._gather(own) for event in decode_events(row)]
        return Timeline(num_stages=self.num_stages, events=tuple(sorted(events, key=lambda event: event.begin)))

    def _gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes of this one's replica."""
        mark = self._replica.to_bytes(4)
        return [row[4:] for row in self._site.gather(mark + message) if row[:4] == mark]

    def _announce(self, inputs: Any) -> Announcement:
        if self.is_first and inputs is None:
            raise InvalidValue("inputs", None, "given where the first stage is")
        message = announce(inputs, self._example).encode() if self.is_first else b""
        return decode(self._site.tell(message))

    def _run(self, work: Callable[[int, Post], T], seed: int) -> dict[int, T]:
        self._stages.begin(mix(seed, self._replica))
        try:
            return self._site.run(work)
        except BaseException:
            self._stages.forget()
            raise
