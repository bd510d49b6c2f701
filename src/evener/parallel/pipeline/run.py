"""Performs a stage's actions in order: waits for what an action needs, computes, sends what it made.

for action in actions:
    what the next actions need may come from now on
    wait for what this one needs
    compute
    send what it made, and go on at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from evener.oracle.schedule import Action
from evener.parallel.pipeline.mail import Post
from evener.parallel.pipeline.stage import Stage
from evener.parallel.pipeline.stage_program import StageProgram
from evener.parallel.pipeline.timeline import Clock

_AHEAD = 2
"""Actions for which tensors may come in before their turn; each holds memory for them."""


class Runner:
    """One stage at its work.

    Args:
        stage: computes.
        programs: of its micro-batches.
        post: to the other stages.
        clock: times it.
    """

    def __init__(self, stage: Stage, programs: Sequence[StageProgram], post: Post, clock: Clock) -> None:
        self._stage, self._programs, self._post, self._clock = stage, programs, post, clock
        self._coming: dict[Action, list[Callable[[], Tensor]]] = {}

    def run(self, actions: Sequence[Action], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Perform `actions`; returns what those of evaluation made.

        Args:
            actions: in order.
            inputs: the model's, of every micro-batch; only the first stage reads them.
        """
        made: list[Any] = []
        for i, action in enumerate(actions):
            for coming in actions[i : i + 1 + _AHEAD]:
                if coming not in self._coming:
                    self._coming[coming] = self._expect(coming)
            arrived = [wait() for wait in self._coming.pop(action)]
            self._perform(action, arrived or inputs[action.micro_batch], made)
        self._post.finish()
        return made

    def _perform(self, action: Action, arrived: Sequence[Tensor], made: list[Any]) -> None:
        kind, micro_batch = action
        program = self._programs[micro_batch]
        self._clock.start()
        if kind == "recompute":
            self._stage.recompute(micro_batch)
            self._clock.stop(action)
        elif kind == "backward":
            gradients = self._stage.backward(micro_batch, arrived)
            self._clock.stop(action)
            needing = [value for value in program.inputs if value.needs_grad]
            for value, gradient in zip(needing, gradients, strict=True):
                self._post.send(gradient, value.made_by, "gradients")
        else:
            outputs = (self._stage.forward if kind == "forward" else self._stage.evaluate)(micro_batch, arrived)
            self._clock.stop(action)
            if kind == "evaluate":
                made.append(outputs)
            for value, tensor in zip(program.outputs, outputs if program.outputs else (), strict=True):
                for user in value.used_by:
                    self._post.send(tensor.to(value.dtype), user, "activations")

    def _expect(self, action: Action) -> list[Callable[[], Tensor]]:
        program = self._programs[action.micro_batch]
        if action.kind in ("forward", "evaluate"):
            return [self._post.expect(value, value.made_by, "activations") for value in program.inputs]
        if action.kind == "backward":
            return [
                self._post.expect(value, user, "gradients")
                for value in program.outputs
                if value.needs_grad
                for user in value.used_by
            ]
        return []
