"""What a model does, as a list of operations: the model runs once on tensors without memory, and is listened to.

Python runs as it always does (loops, branches on shapes, `isinstance`), so whatever runs on the meta device can be
followed. A module without children is one operation; a call of torch outside of such modules is another. What cannot
be followed (an autograd function of the user's, say) makes the module around it one operation.

The list holds for one shape of the inputs and one mode, training or evaluation: both may decide what a model does.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.errors import InvalidInput
from evener.parallel.pipeline.listener import Listener, NotFollowed
from evener.parallel.pipeline.skeleton import without_memory

_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", "<")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model's operations, in order.

    Attributes:
        graph: of torch.fx; `meta` of a node holds `value` (what it returned, on the meta device), `number` (its own),
            `random` (whether it drew random numbers), `context` (set around it by the model, or None) and `module`
            (path of the module that it was in).
        device: that stands in the graph for the one that a stage runs on.
        constants: tensors that the model's code made itself without any operation, by the name under which the graph
            knows them.
        changed: the last node that changed a storage in place, by storage.
        states: buffers that the pass changed, other than BatchNorm's running statistics.
        whole: modules that could not be looked into, with the reason.
    """

    graph: fx.Graph
    device: torch.device
    constants: Mapping[str, Tensor]
    changed: Mapping[int, fx.Node]
    states: tuple[str, ...]
    whole: Mapping[str, str]

    @property
    def operations(self) -> list[fx.Node]:
        """Nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op.startswith("call")]


def trace(model: nn.Module, inputs: Any, device: torch.device, training: bool = True) -> Trace:
    """Follow `model` on tensors shaped like `inputs`: a tensor, or positional or named arguments.

    Args:
        model: on any device; neither run nor changed, a copy without memory is.
        inputs: only shapes and dtypes matter.
        device: where the model will run, which its code may ask for.
        training: mode of the model.

    Raises:
        InvalidInput: names the line of the model that cannot be followed.
    """
    whole: dict[str, str] = {}
    while True:
        listener = Listener(without_memory(model).train(training), device, whole.keys())
        try:
            listener.run(inputs)
        except Exception as error:
            path, reason = listener.innermost, f"{_place(error, listener.innermost_module)}: {_first_line(error)}"
            fails_anyhow = listener.is_in_operation and not isinstance(error, NotFollowed)
            if fails_anyhow or not path or path in whole:
                raise InvalidInput(f"the model cannot be cut into stages, because of {reason}") from error
            whole[path] = reason
        else:
            return Trace(
                graph=listener.graph,
                device=device,
                constants=listener.constants,
                changed=listener.changed,
                states=listener.states,
                whole=whole,
            )


def _place(error: Exception, module: nn.Module) -> str:
    """The user's own line that raised `error`, or else where the code of `module` begins."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
    if own:
        return f"{own[-1].filename}, line {own[-1].lineno} (`{own[-1].line}`)"
    code = type(module).forward.__code__
    return f"{code.co_filename}, line {code.co_firstlineno} (`{type(module).__name__}.forward`)"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
