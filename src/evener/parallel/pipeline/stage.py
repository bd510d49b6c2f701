"""One stage of a pipeline: forward, recompute and backward of its micro-batches, and what it keeps between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.parallel.pipeline.randomness import Dice
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.pipeline.stage_program import StageProgram


class Stage:
    """A stage's work on the micro-batches of one step.

    Args:
        part: what it holds.
        programs: one a micro-batch.
        dice: of the programs.
        again: micro-batches to recompute.
        loss: of (what the model returned, micro-batch), weighted so that the sum over micro-batches is the step's;
            given to the last stage, in training.

    Attributes:
        total: loss of the micro-batches so far; zero on other stages than the last.
    """

    def __init__(
        self,
        part: StageModules,
        programs: Sequence[StageProgram],
        dice: Dice,
        again: Collection[int] = (),
        loss: Callable[[Any, int], Tensor] | None = None,
    ) -> None:
        self._part, self._programs, self._dice, self._again, self._loss = part, programs, dice, again, loss
        self._given: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}
        self.total = torch.zeros((), device=dice.device)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        """What the stage makes of `inputs`; of a micro-batch that is to be recomputed only the inputs are kept.

        The last stage, which has nobody to tell, leaves such a micro-batch to `recompute` altogether.
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

    def recompute(self, micro_batch: int) -> None:
        """The forward pass once more, kept for backward; statistics do not count twice."""
        self._compute(micro_batch, counting=self._loss is not None)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that need one, from those of the outputs, one for every stage that uses an output."""
        made, given = self._made.pop(micro_batch), self._given.pop(micro_batch)
        if made:
            torch.autograd.backward(made, list(gradients) if self._loss is None else None)
        needing = [tensor for tensor in given if tensor.requires_grad]
        return [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in needing]

    def evaluate(self, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
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
        values = self._programs[micro_batch].outputs
        pairs = zip(made, values, strict=True)
        self._made[micro_batch] = [tensor for tensor, value in pairs if value.needs_grad for _ in value.used_by]
        return made

    def _run(self, micro_batch: int, counting: bool) -> Any:
        for norm in self._part.norms.values():
            norm.counting = counting
        self._dice.micro_batch = micro_batch
        return self._programs[micro_batch].run(*self._given[micro_batch])
