"""The stages of this process: their programs, and what they have to do with the micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from evener.errors import require
from evener.oracle.schedule import SCHEDULES, Action, evaluation, max_held, with_recomputing
from evener.parallel.pipeline.micro_batches import divided, micro_batch_sizes, resized, samples_in
from evener.parallel.pipeline.p2p import P2P
from evener.parallel.pipeline.partition_plan import PartitionPlan, PipelineConfig, recomputed
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.placement import StageHost
from evener.parallel.pipeline.rng import StageRNG, mix
from evener.parallel.pipeline.stage import StageRun
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.pipeline.stage_program import StageProgram, StagePrograms
from evener.parallel.pipeline.timeline import StageClock, StageEvent
from evener.tracer.nested import tensors_in

T = TypeVar("T")
Row = Mapping[int, StageProgram]
"""The programs of one micro-batch, by stage."""
ScaledLoss = Callable[[Any, int], Tensor]
"""Loss of (what the model returned, micro-batch), a part of the batch's."""


class Executor:
    """Runs the stages of this process.

    Args:
        problem: whose model was cut.
        plan: of this process's replica.
        config: what the user asked for.
        modules: of the stages of this process.
        host: where they run.
        replica: number of this process's one.
    """

    def __init__(
        self,
        problem: PartitionProblem,
        plan: PartitionPlan,
        config: PipelineConfig,
        modules: Mapping[int, StageModules],
        host: StageHost,
        replica: int,
    ) -> None:
        self._states, self._samples = problem.traced.states, samples_in(problem.example)
        self._plan, self._config, self._host, self._modules, self._replica = plan, config, host, modules, replica
        self._rng = {stage: StageRNG(device) for stage, device in host.devices.items()}
        self._programs = StagePrograms(problem, plan.layout, modules, self._rng)
        self._clocks = {stage: StageClock(stage, device, host.timer) for stage, device in host.devices.items()}

    def programs(self, like: Any, training: bool) -> list[Row]:
        """Of every micro-batch of a batch shaped `like`, by stage."""
        sizes = micro_batch_sizes(samples_in(like), self._config.micro_batches)
        made = {size: self._programs.of(resized(like, size), training) for size in set(sizes)}
        return [made[size] for size in sizes]

    def train(
        self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int], loss: ScaledLoss | None, seed: int
    ) -> Tensor:
        """Forward and backward of a batch; the loss of the last stage that runs here.

        Args:
            rows: programs of the micro-batches.
            inputs: of the batch, where the first stage is.
            sizes: samples of the micro-batches.
            loss: where the last stage is.
            seed: of random layers.
        """
        micro_batches = self._micro_batches(inputs, sizes)
        for clock in self._clocks.values():
            clock.clear()

        def work(stage: int, p2p: P2P) -> Tensor:
            last = self._plan.layout.num_stages - 1
            actions = SCHEDULES[self._config.schedule](stage, last + 1, len(micro_batches))
            again = self._recomputed(stage, actions, sizes[0])
            own, ends_here = [row[stage] for row in rows], loss if stage == last else None
            rng, clock = self._rng[stage], self._clocks[stage]
            run = StageRun(self._modules[stage], own, rng, p2p, clock, again, ends_here)
            run.run(with_recomputing(actions, again), micro_batches)
            return run.total

        return self._run(work, seed)

    def evaluate(self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int], seed: int) -> list[Any]:
        """Forward without gradients, likewise: what the last stage that runs here makes of every micro-batch."""
        micro_batches = self._micro_batches(inputs, sizes)

        def work(stage: int, p2p: P2P) -> list[Any]:
            own, clock = [row[stage] for row in rows], StageClock(stage, self._host.devices[stage], self._host.timer)
            run = StageRun(self._modules[stage], own, self._rng[stage], p2p, clock)
            return run.run(evaluation(len(micro_batches)), micro_batches)

        return self._run(work, seed)

    def forget(self) -> None:
        """Drop what BatchNorms have seen in this batch."""
        for held in self._modules.values():
            for norm in held.norms.values():
                norm.forget()

    def events(self) -> list[StageEvent]:
        """Of the last batch in training."""
        return [event for clock in self._clocks.values() for event in clock.events()]

    def _run(self, work: Callable[[int, P2P], T], seed: int) -> T:
        """What `work` returns for the last of the stages that run here."""
        for rng in self._rng.values():
            rng.seed = mix(seed, self._replica)
        try:
            made = self._host.run(work)
        except BaseException:
            self.forget()
            raise
        return made[max(made)]

    def _micro_batches(self, inputs: Any, sizes: Sequence[int]) -> list[Sequence[Tensor]]:
        """The model's inputs of every micro-batch; none where the first stage is elsewhere."""
        if 0 not in self._host.devices:
            return [()] * len(sizes)
        first = self._host.devices[0]
        return [[tensor.to(first) for tensor in tensors_in(part)] for part in divided(inputs, sizes)]

    def _recomputed(self, stage: int, actions: Sequence[Action], samples: int) -> frozenset[int]:
        """Micro-batches, of up to so many samples, that `stage` recomputes."""
        policy = self._config.rematerialise
        changing = [name for name in self._states if name in dict(self._modules[stage].root.named_buffers())]
        if changing and policy != "never":
            allowed = f"never or auto, as a second pass would change {changing[0]} again"
            require(policy == "auto", "rematerialise", policy, allowed)
            return frozenset()
        most_kept = self._plan.most_kept(stage, max_held(actions), samples / self._samples)
        return recomputed(policy, actions, most_kept)
