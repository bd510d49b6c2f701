"""This process's stages: what they hold, the programs that they run, and their work on the micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.comm.step_timing import StepTimer
from evener.errors import require
from evener.oracle.schedule import SCHEDULES, Action, evaluation, max_held, with_recomputing
from evener.parallel.pipeline.batches import divided, resized, samples_in, sizes_of
from evener.parallel.pipeline.design import Design, Wish
from evener.parallel.pipeline.mail import Post
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.randomness import Dice
from evener.parallel.pipeline.rematerialise import recomputed
from evener.parallel.pipeline.run import Runner
from evener.parallel.pipeline.stage import Stage
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.pipeline.stage_program import StageProgram, StagePrograms
from evener.parallel.pipeline.timeline import Clock, Event
from evener.tracer.nested import tensors_in

Row = Mapping[int, StageProgram]
"""The programs of one micro-batch, by stage."""


class OwnStages:
    """The stages of this process.

    Args:
        model: that was cut.
        design: of this process's replica.
        wish: what the user asked for.
        parts: of the model, by stage.
        devices: of the stages.
        timer: of the process, if it keeps one.
    """

    def __init__(
        self,
        model: PartitionProblem,
        design: Design,
        wish: Wish,
        parts: Mapping[int, StageModules],
        devices: Mapping[int, torch.device],
        timer: StepTimer | None,
    ) -> None:
        self._states, self._samples = model.traced.states, samples_in(model.example)
        self._design, self._wish, self._devices, self._timer = design, wish, devices, timer
        self.parts = parts
        self._dice = {stage: Dice(device) for stage, device in devices.items()}
        self._programs = StagePrograms(model, design.layout, parts, self._dice)
        self._clocks = {stage: Clock(stage, device, timer) for stage, device in devices.items()}

    def programs(self, like: Any, training: bool) -> list[Row]:
        """Of every micro-batch of a batch shaped `like`."""
        sizes = sizes_of(samples_in(like), self._wish.micro_batches)
        made = {size: self._programs.of(resized(like, size), training) for size in set(sizes)}
        return [made[size] for size in sizes]

    def begin(self, seed: int) -> None:
        """A batch begins, random by `seed`."""
        for dice in self._dice.values():
            dice.seed = seed

    def training(
        self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int], loss: Callable[[Any, int], Tensor] | None
    ) -> Callable[[int, Post], Tensor]:
        """Forward and backward of micro-batches of `sizes`: what a stage (number, post) has to do, for its `loss`."""
        for clock in self._clocks.values():
            clock.clear()

        def work(number: int, post: Post) -> Tensor:
            actions = SCHEDULES[self._wish.schedule](number, self._design.layout.num_stages, len(sizes))
            again = self._recomputed(number, actions, sizes[0])
            own = [row[number] for row in rows]
            ends_here = loss if number == self._design.layout.num_stages - 1 else None
            stage = Stage(self.parts[number], own, self._dice[number], again, ends_here)
            runner = Runner(stage, own, post, self._clocks[number])
            runner.run(with_recomputing(actions, again), self._inputs(inputs, sizes))
            return stage.total

        return work

    def evaluating(self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int]) -> Callable[[int, Post], list[Any]]:
        """Forward without gradients, likewise; what the last stage makes of every micro-batch comes back."""

        def work(number: int, post: Post) -> list[Any]:
            own = [row[number] for row in rows]
            stage = Stage(self.parts[number], own, self._dice[number])
            clock = Clock(number, self._devices[number], self._timer)
            return Runner(stage, own, post, clock).run(evaluation(len(sizes)), self._inputs(inputs, sizes))

        return work

    def forget(self) -> None:
        """Drop what BatchNorms have seen in this batch."""
        for part in self.parts.values():
            for norm in part.norms.values():
                norm.forget()

    def events(self) -> list[Event]:
        """Of the last batch in training."""
        return [event for clock in self._clocks.values() for event in clock.events()]

    def _inputs(self, inputs: Any, sizes: Sequence[int]) -> list[Sequence[Tensor]]:
        if 0 not in self._devices:
            return [()] * len(sizes)
        return [[tensor.to(self._devices[0]) for tensor in tensors_in(part)] for part in divided(inputs, sizes)]

    def _recomputed(self, stage: int, actions: Sequence[Action], samples: int) -> frozenset[int]:
        """Micro-batches, of up to so many samples, that `stage` recomputes."""
        policy = self._wish.rematerialise
        changing = [name for name in self._states if name in dict(self.parts[stage].root.named_buffers())]
        if changing and policy != "never":
            allowed = f"never or auto, as a second pass would change {changing[0]} again"
            require(policy == "auto", "rematerialise", policy, allowed)
            return frozenset()
        scale = samples / self._samples
        return recomputed(policy, actions, self._design.most_kept(stage, max_held(actions), scale))
