"""A stage's graph made to run: its code, with the stage's own modules, seeds for what is random, contexts kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from evener.parallel.pipeline.context import Context
from evener.parallel.pipeline.randomness import Dice
from evener.parallel.pipeline.split import StageGraph, Value
from evener.parallel.pipeline.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one stage does with a micro-batch of one shape.

    Attributes:
        run: from `inputs` (the first stage: from the model's inputs) to a tuple of `outputs` (the last stage: to what
            the model returns).
        inputs: values of earlier stages.
        outputs: values for later ones.
    """

    run: Callable[..., Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def compile_stage(stage: StageGraph, root: nn.Module, trace: Trace, dice: Dice) -> Program:
    """The program of `stage` with the modules in `root`.

    Args:
        stage: its graph; it is changed.
        root: what the stage holds.
        trace: that the stage is a part of.
        dice: for random operations; also says which device is the stage's.
    """
    for node in stage.graph.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: dice.device if value == trace.device else value
        )
        if node.op == "get_attr" and node.target in trace.constants:
            node.target, node.op = _constant(trace.constants[node.target].to(dice.device)), "call_function"
            continue
        context = node.meta.get("context")
        if node.op.startswith("call") and (node.meta["random"] or context is not None):
            number = node.meta["number"] if node.meta["random"] else None
            node.target, node.op = _wrapped(_function_of(node, root), dice, number, context), "call_function"
    return Program(run=fx.GraphModule(root, stage.graph), inputs=stage.inputs, outputs=stage.outputs)


def _function_of(node: fx.Node, root: nn.Module) -> Callable[..., Any]:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    def constant() -> Tensor:
        return tensor

    return constant


def _wrapped(
    function: Callable[..., Any], dice: Dice, number: int | None, context: Context | None
) -> Callable[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if number is not None:
                stack.enter_context(dice.thrown_for(number))
            if context is not None:
                stack.enter_context(context.applied())
            return function(*args, **kwargs)

    return operation
