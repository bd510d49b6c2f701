"""Execution of this process's stages: forward, recompute and backward of a batch's micro-batches, in order.

for action in actions:
    post receives for the next actions
    wait for this action's inputs
    compute
    send the results, without waiting
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from evener.oracle.schedule import SCHEDULES, Action, divided_in, evaluation, max_held, with_recomputing
from evener.parallel.pipeline.micro_batches import divided, micro_batch_sizes, resized, samples_in
from evener.parallel.pipeline.partition_plan import PartitionPlan, PipelineConfig, recomputed
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.placement import P2P, StageHost
from evener.parallel.pipeline.split_backward import backward_of_inputs
from evener.parallel.pipeline.stage_modules import StageModules, StageRNG, mix
from evener.parallel.pipeline.stage_program import StageProgram, StagePrograms
from evener.parallel.pipeline.timeline import StageClock, StageEvent
from evener.records.errors import require
from evener.tracer.nested import tensors_in

T = TypeVar("T")
Row: TypeAlias = Mapping[int, StageProgram]
"""The programs of one micro-batch, by stage."""
MicroBatchLoss: TypeAlias = Callable[[Any, int], Tensor]
"""Maps (model outputs, micro-batch) to a loss, weighted so that the sum over micro-batches is the step's loss."""
_AHEAD = 2
"""Actions whose inputs may arrive early; each holds memory for them."""


class Executor:
    """Runs the stages of this process, which are those of `host` and hold `modules`."""

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
        for name in self._states:
            allowed = f"never or auto, because a second pass would change {name} again"
            require(config.rematerialise != "always", "rematerialise", config.rematerialise, allowed)
        self._plan, self._config, self._host, self._modules, self._replica = plan, config, host, modules, replica
        self._rng = {stage: StageRNG(device) for stage, device in host.devices.items()}
        self._programs = StagePrograms(problem, plan.layout, modules, self._rng)
        self._clocks = {stage: StageClock(stage, device, host.timer) for stage, device in host.devices.items()}

    def programs(self, like: Any, training: bool) -> list[Row]:
        """Return the programs of every micro-batch of a batch shaped `like`, by stage."""
        sizes = micro_batch_sizes(samples_in(like), self._config.micro_batches)
        made = {size: self._programs.of(resized(like, size), training) for size in set(sizes)}
        return [made[size] for size in sizes]

    def train(
        self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int], loss: MicroBatchLoss | None, seed: int
    ) -> Tensor:
        """Run forward and backward on a batch; return the loss of the last stage that runs here.

        Args:
            rows: Programs of the micro-batches.
            inputs: Inputs of the batch, on the first stage.
            sizes: Samples of each micro-batch.
            loss: Loss, on the last stage.
            seed: Seed of random layers.
        """
        micro_batches = self._micro_batches(inputs, sizes)
        for clock in self._clocks.values():
            clock.clear()

        def work(stage: int, p2p: P2P) -> Tensor:
            last = self._plan.layout.num_stages - 1
            actions = SCHEDULES[self._config.schedule](stage, last + 1, len(micro_batches))
            again = self._recomputed(stage, actions, sizes[0])
            programs, ends_here = [row[stage] for row in rows], loss if stage == last else None
            run = _StageRun(
                self._modules[stage], programs, self._rng[stage], p2p, self._clocks[stage], again, ends_here
            )
            run.run(with_recomputing(actions, again), micro_batches)
            return run.total

        return self._run(work, seed)

    def evaluate(self, rows: Sequence[Row], inputs: Any, sizes: Sequence[int], seed: int) -> list[Any]:
        """Run forward without gradients; return the last local stage's outputs for each micro-batch."""
        micro_batches = self._micro_batches(inputs, sizes)

        def work(stage: int, p2p: P2P) -> list[Any]:
            programs, clock = (
                [row[stage] for row in rows],
                StageClock(stage, self._host.devices[stage], self._host.timer),
            )
            run = _StageRun(self._modules[stage], programs, self._rng[stage], p2p, clock)
            return run.run(evaluation(len(micro_batches)), micro_batches)

        return self._run(work, seed)

    def forget(self) -> None:
        """Drop the statistics of this batch that BatchNorms collected."""
        for held in self._modules.values():
            for norm in held.norms.values():
                norm.forget()

    def events(self) -> list[StageEvent]:
        """Return the events of the last training batch."""
        return [event for clock in self._clocks.values() for event in clock.events()]

    def _run(self, work: Callable[[int, P2P], T], seed: int) -> T:
        """Return the result of `work` for the last of the stages that run here."""
        for rng in self._rng.values():
            rng.seed = mix(seed, self._replica)
        try:
            made = self._host.run(work)
        except BaseException:
            self.forget()
            raise
        return made[max(made)]

    def _micro_batches(self, inputs: Any, sizes: Sequence[int]) -> list[Sequence[Tensor]]:
        """Return the model's inputs of every micro-batch, on the first stage; empty inputs elsewhere."""
        if 0 not in self._host.devices:
            return [()] * len(sizes)
        first = self._host.devices[0]
        return [[tensor.to(first) for tensor in tensors_in(part)] for part in divided(inputs, sizes)]

    def _recomputed(self, stage: int, actions: Sequence[Action], samples: int) -> frozenset[int]:
        """Return the micro-batches, of up to `samples` samples, that `stage` recomputes."""
        policy = self._config.rematerialise
        if any(_is_in(self._modules[stage].root, name) for name in self._states):
            return frozenset()
        max_kept = self._plan.max_kept(stage, max_held(actions), samples / self._samples)
        return recomputed(policy, actions, max_kept)


def _is_in(root: nn.Module, name: str) -> bool:
    """Return whether the stage's modules have the attribute of this `name`."""
    path, _, last = name.rpartition(".")
    try:
        return hasattr(root.get_submodule(path), last)
    except AttributeError:
        return False


class _StageRun:
    """Runs one stage on the micro-batches of one batch.

    Args:
        modules: Modules of the stage.
        programs: One program per micro-batch.
        rng: Random numbers of the programs.
        p2p: Connection to the other stages.
        clock: Times the computation.
        again: Micro-batches to recompute.
        loss: Loss of the last stage in training; `total` is its sum so far.
    """

    def __init__(
        self,
        modules: StageModules,
        programs: Sequence[StageProgram],
        rng: StageRNG,
        p2p: P2P,
        clock: StageClock,
        again: Collection[int] = (),
        loss: MicroBatchLoss | None = None,
    ) -> None:
        self._modules, self._programs, self._rng, self._again, self._loss = modules, programs, rng, again, loss
        self._p2p, self._clock = p2p, clock
        self._coming: dict[Action, list[Callable[[], Tensor]]] = {}
        self._inputs: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}
        self._later: dict[int, Callable[[], object]] = {}
        self._divided: Collection[int] = ()
        self.total = torch.zeros((), device=rng.device)

    def run(self, actions: Sequence[Action], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Perform `actions` in order; return the results of evaluation. Only the first stage reads `inputs`."""
        evaluated = []
        self._divided = divided_in(actions)
        for i, action in enumerate(actions):
            for coming in actions[i : i + 1 + _AHEAD]:
                if coming not in self._coming:
                    self._coming[coming] = self._expect(coming)
            arrived = [wait() for wait in self._coming.pop(action)] or inputs[action.micro_batch]
            made = self._perform(action, arrived)
            evaluated += [made] if action.kind == "evaluate" else []
            del made, arrived
        self._p2p.finish()
        return evaluated

    def _expect(self, action: Action) -> list[Callable[[], Tensor]]:
        """Post receives for what `action` needs of other stages."""
        program = self._programs[action.micro_batch]
        if action.kind in ("forward", "evaluate"):
            return [self._p2p.expect(value, value.made_by, "activations") for value in program.inputs]
        if action.kind == "backward":
            wanted = [(value, user) for value in program.outputs if value.needs_grad for user in value.used_by]
            return [self._p2p.expect(value, user, "gradients") for value, user in wanted]
        return []

    def _perform(self, action: Action, arrived: Sequence[Tensor]) -> Any:
        """Compute, and send the results."""
        perform = {
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "weights": self._add_to_weights,
            "evaluate": self._evaluate,
        }[action.kind]
        self._clock.start()
        made = perform(action.micro_batch, arrived)
        self._clock.stop(action)
        program = self._programs[action.micro_batch]
        if action.kind == "backward":
            needing = [value for value in program.inputs if value.needs_grad]
            for value, gradient in zip(needing, made, strict=True):
                self._p2p.send(gradient, value.made_by, "gradients")
        elif action.kind in ("forward", "evaluate") and program.outputs:
            for value, tensor in zip(program.outputs, made, strict=True):
                for user in value.used_by:
                    self._p2p.send(tensor.to(value.dtype), user, "activations")
        return made

    def _forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        """Return the stage's outputs; a micro-batch to recompute keeps only its inputs.

        The last stage, which sends nothing, skips such a micro-batch until `recompute`.
        """
        values = self._programs[micro_batch].inputs
        self._inputs[micro_batch] = [tensor.detach() for tensor in inputs]
        for tensor, value in zip(self._inputs[micro_batch], values, strict=bool(values)):
            tensor.requires_grad_(value.needs_grad)
        if micro_batch not in self._again:
            return self._compute(micro_batch, counting=True)
        if self._loss is not None:
            return ()
        with torch.no_grad():
            return self._program(micro_batch, counting=True)

    def _recompute(self, micro_batch: int, _arrived: Sequence[Tensor]) -> None:
        """Run the forward pass again, kept for backward, without counting statistics twice."""
        self._compute(micro_batch, counting=self._loss is not None)

    def _backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients of the inputs that need one, from one gradient for each stage that uses an output."""
        made, inputs = self._made.pop(micro_batch), self._inputs.pop(micro_batch)
        needing = [tensor for tensor in inputs if tensor.requires_grad]
        wanted = list(gradients) if self._loss is None else None
        if micro_batch in self._divided:
            grads, self._later[micro_batch] = backward_of_inputs(made, wanted, needing)
        else:
            if made:
                torch.autograd.backward(made, wanted)
            grads = [tensor.grad for tensor in needing]
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(needing, grads, strict=True)]

    def _add_to_weights(self, micro_batch: int, _arrived: Sequence[Tensor]) -> None:
        """Add to the gradients of the weights what the backward pass left for later."""
        self._later.pop(micro_batch)()

    def _evaluate(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        self._inputs[micro_batch] = list(inputs)
        with torch.no_grad():
            made = self._program(micro_batch, counting=False)
        del self._inputs[micro_batch]
        return made

    def _compute(self, micro_batch: int, counting: bool) -> Any:
        """Return the stage's outputs, kept for backward; the last stage also computes the loss."""
        made = self._program(micro_batch, counting)
        if self._loss is not None:
            made = self._loss(made, micro_batch)
            self.total = self.total + made.detach()
            self._made[micro_batch] = [made] if made.requires_grad else []
            return ()
        pairs = zip(made, self._programs[micro_batch].outputs, strict=True)
        self._made[micro_batch] = [tensor for tensor, value in pairs if value.needs_grad for _ in value.used_by]
        return made

    def _program(self, micro_batch: int, counting: bool) -> Any:
        for norm in self._modules.norms.values():
            norm.begin(counting)
        self._rng.micro_batch = micro_batch
        return self._programs[micro_batch].run(*self._inputs[micro_batch])
