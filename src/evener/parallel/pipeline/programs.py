"""The programs of this process's stages, made when a shape or mode first comes up, and kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from evener.parallel.pipeline.layout import Layout, stages_in
from evener.parallel.pipeline.parts import Part, attach, targets_of
from evener.parallel.pipeline.program import Program, compile_stage
from evener.parallel.pipeline.randomness import Dice
from evener.parallel.pipeline.skeleton import attribute
from evener.parallel.pipeline.split import split
from evener.parallel.pipeline.subject import Subject
from evener.parallel.pipeline.tensors import tensors_in
from evener.parallel.pipeline.trace import Trace, trace

_Key = tuple[Any, ...]


class Programs:
    """Programs by shape of the inputs and mode.

    Args:
        model: that was cut.
        layout: its stages.
        parts: of the stages of this process.
        dice: likewise.
    """

    def __init__(self, model: Subject, layout: Layout, parts: Mapping[int, Part], dice: Mapping[int, Dice]) -> None:
        self._skeleton, self._device = model.skeleton, model.trace.device
        self._layout, self._parts, self._dice = layout, parts, dice
        self._made = {_key(model.example, True): self._make(model.trace)}

    def of(self, inputs: Any, training: bool) -> dict[int, Program]:
        """By stage, for a micro-batch shaped like `inputs`."""
        key = _key(inputs, training)
        if key not in self._made:
            self._made[key] = self._make(trace(self._skeleton, inputs, self._device, training))
        return self._made[key]

    def _make(self, traced: Trace) -> dict[int, Program]:
        graphs = split(traced, stages_in(traced, self._layout), self._layout.num_stages)
        made = {}
        for stage, part in self._parts.items():
            for name in targets_of(graphs[stage].graph, traced.constants):
                if self._layout.stage_of_target(name) is None:  # a module without tensors that training does not use
                    attach(part.root, name, copy.deepcopy(attribute(self._skeleton, name)), self._skeleton)
            made[stage] = compile_stage(graphs[stage], part.root, traced, self._dice[stage])
        return made


def _key(inputs: Any, training: bool) -> _Key:
    return (training, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(inputs)))
