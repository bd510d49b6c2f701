"""One stage of a pipeline at its work on one batch: forward, recompute and backward of its micro-batches, in order.

for action in actions:
    what the next actions need may come from now on
    wait for what this one needs
    compute
    send what it made, and go on at once
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.oracle.schedule import Action
from evener.parallel.pipeline.p2p import P2P
from evener.parallel.pipeline.rng import StageRNG
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.pipeline.stage_program import StageProgram
from evener.parallel.pipeline.timeline import StageClock

_AHEAD = 2
"""Actions for which tensors may come in before their turn; each holds memory for them."""


class StageRun:
    """A stage's work on the micro-batches of one batch.

    Args:
        modules: what the stage holds.
        programs: one a micro-batch.
        rng: of the programs.
        p2p: to the other stages.
        clock: times what is computed.
        again: micro-batches to recompute.
        loss: of (what the model returned, micro-batch), weighted so that the sum over micro-batches is the step's;
            given to the last stage, in training.

    Attributes:
        total: loss of the micro-batches so far; zero on other stages than the last.
    """

    def __init__(
        self,
        modules: StageModules,
        programs: Sequence[StageProgram],
        rng: StageRNG,
        p2p: P2P,
        clock: StageClock,
        again: Collection[int] = (),
        loss: Callable[[Any, int], Tensor] | None = None,
    ) -> None:
        self._modules, self._programs, self._rng, self._again, self._loss = modules, programs, rng, again, loss
        self._p2p, self._clock = p2p, clock
        self._coming: dict[Action, list[Callable[[], Tensor]]] = {}
        self._given: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}
        self._evaluated: list[Any] = []
        self.total = torch.zeros((), device=rng.device)

    def run(self, actions: Sequence[Action], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Perform `actions`; returns what those of evaluation made.

        Args:
            actions: in order.
            inputs: the model's, of every micro-batch; only the first stage reads them.
        """
        for i, action in enumerate(actions):
            for coming in actions[i : i + 1 + _AHEAD]:
                if coming not in self._coming:
                    self._coming[coming] = self._expect(coming)
            arrived = [wait() for wait in self._coming.pop(action)] or inputs[action.micro_batch]
            self._perform(action, arrived)
        self._p2p.finish()
        return self._evaluated

    def _expect(self, action: Action) -> list[Callable[[], Tensor]]:
        """Get ready for what `action` needs of other stages."""
        program = self._programs[action.micro_batch]
        if action.kind in ("forward", "evaluate"):
            return [self._p2p.expect(value, value.made_by, "activations") for value in program.inputs]
        if action.kind == "backward":
            wanted = [(value, user) for value in program.outputs if value.needs_grad for user in value.used_by]
            return [self._p2p.expect(value, user, "gradients") for value, user in wanted]
        return []

    def _perform(self, action: Action, arrived: Sequence[Tensor]) -> None:
        """Compute, and send what was made; nothing of it is held on to here."""
        perform = {
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
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
        elif action.kind != "recompute" and program.outputs:
            for value, tensor in zip(program.outputs, made, strict=True):
                for user in value.used_by:
                    self._p2p.send(tensor.to(value.dtype), user, "activations")
        if action.kind == "evaluate":
            self._evaluated.append(made)

    def _forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        """What the stage makes of `inputs`; of a micro-batch that is to be recomputed only the inputs are kept.

        The last stage, which sends nothing on, leaves such a micro-batch to `recompute` altogether.
        """
        values = self._programs[micro_batch].inputs
        self._given[micro_batch] = [tensor.detach() for tensor in inputs]
        for tensor, value in zip(self._given[micro_batch], values, strict=bool(values)):
            tensor.requires_grad_(value.needs_grad)
        if micro_batch not in self._again:
            return self._compute(micro_batch, counting=True)
        if self._loss is not None:
            return ()
        with torch.no_grad():
            return self._run(micro_batch, counting=True)

    def _recompute(self, micro_batch: int, _arrived: Sequence[Tensor]) -> None:
        """The forward pass once more, kept for backward; statistics do not count twice."""
        self._compute(micro_batch, counting=self._loss is not None)

    def _backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that need one, from those of the outputs, one for every stage that uses an output."""
        made, given = self._made.pop(micro_batch), self._given.pop(micro_batch)
        if made:
            torch.autograd.backward(made, list(gradients) if self._loss is None else None)
        needing = [tensor for tensor in given if tensor.requires_grad]
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in needing]

    def _evaluate(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        """What the stage makes of `inputs`; nothing is kept."""
        self._given[micro_batch] = list(inputs)
        with torch.no_grad():
            made = self._run(micro_batch, counting=False)
        del self._given[micro_batch]
        return made

    def _compute(self, micro_batch: int, counting: bool) -> Any:
        made = self._run(micro_batch, counting)
        if self._loss is not None:
            made = self._loss(made, micro_batch)
            self.total = self.total + made.detach()
            self._made[micro_batch] = [made] if made.requires_grad else []
            return ()
        pairs = zip(made, self._programs[micro_batch].outputs, strict=True)
        self._made[micro_batch] = [tensor for tensor, value in pairs if value.needs_grad for _ in value.used_by]
        return made

    def _run(self, micro_batch: int, counting: bool) -> Any:
        for norm in self._modules.norms.values():
            norm.counting = counting
        self._rng.micro_batch = micro_batch
        return self._programs[micro_batch].run(*self._given[micro_batch])
